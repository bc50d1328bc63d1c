"""How two runs differ."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.reports.diff import compare
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog
from paceline.runs.record import Attempt
from paceline.system.files import write_json
from tests.helpers import make_job, make_run


def run_of(tmp_path: Path, number: int, source: str, values: list[float], **given: Any) -> RunFolder:
    snapshot = tmp_path / "snapshots" / f"{number:064x}"
    snapshot.mkdir(parents=True)
    (snapshot / "train.py").write_text(source)
    folder, fd = make_run(tmp_path / "runs", f"fit_170000000{number}_0123abcd", snapshot_id=snapshot.name, **given)
    os.close(fd)
    folder.snapshot.unlink(missing_ok=True)
    folder.snapshot.symlink_to(snapshot)
    log = MetricLog(folder.metric_log(0))
    for step, value in enumerate(values):
        log.scalar("loss", value, step)
        log.scalar("time", float(number))
    log.scalar("same", math.nan, 1)
    log.close()
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> tuple[RunFolder, RunFolder]:
    a = run_of(
        tmp_path,
        1,
        "lr = 1\n",
        [3.0, 2.0, 1.0],
        job=make_job(
            arguments=("data", "--lr", "0.1", "-v"), environment_variables={"MODE": "fast", "MY_TOKEN": "hf_x"}
        ),
        attempts=(Attempt(number=1, started_utc="2026-01-01T00:00:00.000Z", nodes=("n1",), cores=4, gpus=0),),
        git={"commit": "a" * 40, "dirty": False},
    )
    b = run_of(
        tmp_path,
        2,
        "lr = 2\n",
        [3.0, 2.5, 1.0, 0.5],
        job=make_job(
            arguments=("data", "--lr=0.2"),
            environment_variables={"MODE": "slow", "MY_TOKEN": "hf_x"},
            node_count=2,
            distributed_backend="gloo",
            max_restarts=3,
        ),
        attempts=(Attempt(number=1, started_utc="2026-01-01T00:00:00.000Z", nodes=("n1", "n2"), cores=8, gpus=0),),
        git={"commit": "b" * 40, "dirty": False},
    )
    write_json(a.environment, {"pip": ["numpy==2.1.0", "torch==2.9.0"], "base_python": "3.11"})
    write_json(b.environment, {"pip": ["numpy==2.2.0", "torch==2.9.0", "rich==15"], "base_python": "3.11"})
    for folder, print_ in ((a, "f1"), (b, "f2")):
        one = {"name": "train", "node_rank": 0, "content": print_, "files": 3, "path": "p"}
        write_json(folder.data, {"inputs": [one, one | {"node_rank": 1, "content": "of another node"}]})
    return a, b


@pytest.mark.promise("two-runs-compared-made-them")
def test_compare_reports_each_difference_between_two_runs_and_nothing_else(runs: tuple[RunFolder, RunFolder]) -> None:
    found = compare(*runs)

    def changes(name: str) -> dict[str, tuple[Any, Any]]:
        return {one.name: (one.a, one.b) for one in getattr(found, name)}

    assert changes("parameters") == {"--lr": ("0.1", "0.2"), "-v": ("", None), "$MODE": ("fast", "slow")}
    assert changes("settings") == {"max_restarts": (0, 3)}
    assert changes("git") == {"commit": ("a" * 40, "b" * 40)}
    assert changes("environment") == {"numpy": ("2.1.0", "2.2.0"), "rich": (None, "15")}
    assert changes("data") == {"train: content": ("f1", "f2")}
    topology = {
        "node_count": (1, 2),
        "world_size": (1, 2),
        "distributed_backend": (None, "gloo"),
        "nodes": ("n1", "n1, n2"),
        "cores": (4, 8),
    }
    assert changes("topology") == topology
    assert [(file.name, file.plus, file.minus) for file in found.code] == [("train.py", 1, 1)]
    # `time` has no steps and differs from its first value on, so it comes before `loss`, which differs from step 1 on.
    assert [(one.name, one.step, one.by_step, one.a, one.b) for one in found.metrics] == [
        ("time", 0, False, 1.0, 2.0),
        ("loss", 1, True, 2.0, 2.5),
    ]
    assert (found.metrics[1].last_a, found.metrics[1].last_b, found.metrics[1].count_b) == (1.0, 0.5, 4)
    assert found.parting == found.metrics[0]
    # In a comparison, NaN equals NaN.
    assert found.same_metrics == ("same",)
    told = json.loads(json.dumps(found.to_json()))
    assert told["parting"]["name"] == "time"
    assert "+lr = 2" in told["code"][0]["text"]
    # Values that look like secrets are hidden.
    assert "hf_x" not in json.dumps(told)


def test_comparing_a_run_with_itself_finds_no_difference(runs: tuple[RunFolder, RunFolder]) -> None:
    found = compare(runs[0], runs[0])
    lists = ("parameters", "settings", "code", "git", "environment", "data", "topology", "metrics")
    assert not any(getattr(found, name) for name in lists)
    assert found.parting is None


def test_code_comparison_with_a_run_whose_snapshot_was_removed_is_empty_with_a_note(
    runs: tuple[RunFolder, RunFolder],
) -> None:
    a, b = runs
    (b.snapshot.resolve() / "train.py").unlink()
    b.snapshot.resolve().rmdir()
    found = compare(a, b)
    assert found.code == ()
    assert found.code_note == f"the snapshot of run {b.run_id} is not here any more"
