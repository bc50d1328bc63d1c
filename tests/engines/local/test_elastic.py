"""Elastic runs on this machine, where a node is a stand-in and is lost by SIGKILL to its workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.runs import states
from tests.engines.elastic import COUNTS, began_at, pid_of, wait_for_attempt, wait_for_step
from tests.engines.lab import Lab, kill_together, wait_for_end


@pytest.mark.promise("elastic-run-goes-nodes-left")
def test_elastic_run_continues_without_a_lost_node_and_takes_it_back(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    run = lab.submit(
        COUNTS,
        arguments=[str(gate)],
        node_count=(2, 3),
        process_count_per_node=2,
        distributed_backend="gloo",
        elastic_seconds=1,
    )
    first = wait_for_attempt(run, 1, 6)
    assert (first.reason, run.record().size) == ("start", "nodes 3 of 2..3")
    wait_for_step(run, 5)
    # Kill both workers of the second node: ranks 2 and 3.
    kill_together(run, *(pid_of(run, 1, rank) for rank in (2, 3)))

    second = wait_for_attempt(run, 2, 4)
    assert second.reason is not None
    assert second.reason.startswith("Node local-1 was lost, with ranks 2, 3")
    third = wait_for_attempt(run, 3, 6)
    assert third.reason == "more nodes"
    assert 5 <= began_at(run, 2) < began_at(run, 3)
    gate.touch()
    assert wait_for_end(run) == states.COMPLETED

    record = run.record()
    # The run continued after a lost node and after a resize, although max_restarts is 0: these attempts don't count as
    # restarts.
    assert [(attempt.cause, len(attempt.nodes)) for attempt in record.attempts] == [
        ("node_lost", 3),
        ("resized", 2),
        (None, 3),
    ]
    monkeypatch.setenv("PACELINE_WORKSPACE", str(lab.workspace_dir))
    words = ([], [run.id], [run.id])
    shown = "".join(
        subprocess.run(
            [sys.executable, "-m", "paceline", verb, *more], check=True, capture_output=True, text=True
        ).stdout
        for verb, more in zip(("list", "status", "show"), words, strict=True)
    )
    assert "3x2 of 2..3" in shown
    assert "Nodes 3 of 2..3" in shown
    assert "(4 workers)  (Node local-1 was lost" in shown
