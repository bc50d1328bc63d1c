from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import paceline as pl
from paceline.runs import notebook as run_notebook
from paceline.runs import states, store
from paceline.sweeps.live import notebook
from paceline.sweeps.live.table import Shown
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from tests.sweeps.made import make_sweep


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a notebook has shown, the last state of one output."""
    outputs: list[str] = []

    def display(html: str, *, display_id: bool) -> Any:
        assert display_id
        outputs.append(html)
        return SimpleNamespace(update=lambda html: outputs.__setitem__(0, html))

    ipython, shown = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    shown.HTML, shown.display = str, display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", shown)
    return outputs


def test_one_output_is_replaced_until_the_end(tmp_path: Path, kernel: list[str]) -> None:
    spec = SweepSpec(space=Space({"x": pl.uniform(0, 1)}), metric="loss", goal="minimize")
    sweep = make_sweep(tmp_path, spec, states.RUNNING)
    assert run_notebook.is_here()
    end = threading.Timer(0.2, lambda: store.change(sweep, store.stored(sweep), states.COMPLETED))
    end.start()
    assert notebook.to_the_end(sweep).status == states.COMPLETED
    end.join()
    assert len(kernel) == 1
    assert "is Completed" in kernel[0]


def test_a_terminal_without_a_kernel_is_no_notebook(kernel: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", SimpleNamespace)
    assert not run_notebook.is_here()


def test_names_and_values_are_escaped() -> None:
    seen = Shown(lines=("<b>",), header=("TRIAL", "STATUS", "<i>"), rows=(("0", "Failed", "<script>\x1b"),), more=2)
    assert notebook.table_html(seen) == (
        "<div>&lt;b&gt;</div><table><thead><tr><th>TRIAL</th><th>STATUS</th><th>&lt;i&gt;</th></tr></thead><tbody><tr><td>0</td>"
        '<td style="color: firebrick">Failed</td><td>&lt;script&gt;\\x1b</td></tr></tbody></table><div>and 2 more</div>'
    )
