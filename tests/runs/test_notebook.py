"""A run in a notebook."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import paceline
from paceline.runs import notebook, states, store
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog
from paceline.runs.notebook import run_html
from paceline.runs.run import Run
from tests.helpers import make_run


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a notebook has shown, each state of its one output."""
    shown: list[str] = []

    def display(html: str, *, display_id: bool) -> Any:
        assert display_id
        shown.append(html)
        return SimpleNamespace(update=shown.append)

    ipython, of_display = ModuleType("IPython"), ModuleType("IPython.display")
    vars(ipython)["get_ipython"] = lambda: SimpleNamespace(kernel=object())
    vars(of_display).update(HTML=str, display=display)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", of_display)
    return shown


def run_at(tmp_path: Path, **values: Any) -> tuple[Run, RunFolder, int]:
    folder, fd = make_run(tmp_path / "ws" / "runs", status=states.RUNNING, **values)
    return paceline.Run.get(paceline.Workspace(tmp_path / "ws"), folder.run_id), folder, fd


@pytest.mark.promise("run-shows-itself-notebook-live")
def test_notebook_output_of_a_run_is_updated_in_place_until_the_run_ends(tmp_path: Path, outputs: list[str]) -> None:
    run, folder, fd = run_at(tmp_path)
    log = MetricLog(folder.metric_log(0))
    log.scalar("loss", 0.5, 3)
    thread = notebook.show(run._repr_html_, lambda: run.record().is_terminal)
    assert "<b>Running</b>" in outputs[0]
    assert "loss: 0.5 at step 3" in outputs[0]
    log.scalar("loss", 0.25, 4)
    log.scalar("<script>", 1.0)
    store.change(folder, store.stored(folder), states.COMPLETED, exit_code=0)
    os.close(fd)
    thread.join(60)
    assert not thread.is_alive()
    assert "Completed" in outputs[-1]
    assert "loss: 0.25 at step 4" in outputs[-1]
    assert "<script>" not in outputs[-1]
    count = len(outputs)
    run.show()
    while len(outputs) == count:
        time.sleep(0.01)
    assert outputs[-1] == outputs[-2]


def test_show_outside_a_notebook_prints_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _, fd = run_at(tmp_path)
    assert not notebook.is_here()
    run.show()
    assert capsys.readouterr().out == f"Run {run.id}: Running. paceline logs -f {run.id}\n"
    os.close(fd)


def test_notebook_reads_the_end_of_a_long_log_and_skips_a_torn_line(tmp_path: Path) -> None:
    run, folder, fd = run_at(tmp_path)
    log = MetricLog(folder.metric_log(1))
    for step in range(3000):
        log.scalar("loss", float(step), step)
    other = MetricLog(folder.metric_log(0))
    other.scalar("acc", 0.5)
    with open(folder.metric_log(0), "ab") as file:
        file.write(b'{"name":"acc","value":0.7')
    html = run._repr_html_()
    assert "loss: 2999 at step 2999" in html
    assert "acc: 0.5<" in html
    os.close(fd)


def test_notebook_view_of_a_hanging_run_shows_the_reason(tmp_path: Path) -> None:
    hang = {"since_utc": "2026-11-23T06:12:03.000Z", "text": "Rank 0 waits for <rank 1>.", "report": "hang.txt"}
    folder, fd = make_run(tmp_path / "runs", status=states.RUNNING, hang=hang)
    assert "Rank 0 waits for &lt;rank 1&gt;." in run_html(folder)
    os.close(fd)


def test_repr_of_a_run_record_is_one_line(tmp_path: Path) -> None:
    folder, fd = make_run(tmp_path / "runs", status=states.COMPLETED, exit_code=0)
    os.close(fd)
    assert repr(store.stored(folder)) == f"RunRecord(run_id={folder.run_id!r}, status='Completed', exit_code=0)"
