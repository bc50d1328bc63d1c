"""The load of a run's nodes and workers, from the files that its supervisor has left."""

from __future__ import annotations

from pathlib import Path

from paceline.observe import loads
from paceline.runs.folder import RunFolder
from paceline.system.files import append_line


def test_load_of_a_run_lists_only_the_nodes_of_its_last_attempt(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.mkdir()
    for number in range(2):
        for value in (10.0, 20.0):
            append_line(folder.metrics / f"node_{number}.jsonl", {"name": "cpu_percent", "value": value, "step": 1})
    sample = {"nodes": {"0": {"name": "here", "cpu_percent": 99.0}}, "ranks": {}}

    found = loads.whole(folder, sample)

    assert found["nodes"] == {"0": {"name": "here", "cpu_percent": 15.0}}
    assert [row[:2] for row in loads.node_rows(found)] == [("here", "15 %")]
