"""The processes that keep states in the memory of a run's nodes: when they start, and which address each node gets."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.job.plan import Command, Launch, ProcessExit, StartedCommand
from paceline.runs.folder import RunFolder
from paceline.supervisor.state_keepers import StateKeepers
from tests.helpers import make_job, make_launch


class FakeNodes:
    def __init__(self) -> None:
        self.started: list[Command] = []
        self.files: list[tuple[int, str, Any]] = []

    def start(self, command: Command, work_dir: Path, shell: Any) -> StartedCommand:
        if command.node_rank == 2:
            raise OSError("it is gone")
        self.started.append(command)
        return StartedCommand(command=command, pid=100 + command.node_rank)

    def put(self, node_rank: int, path: str, data: bytes) -> None:
        self.files.append((node_rank, path, json.loads(data)))


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    job = make_job(node_count=3, process_count_per_node=1, distributed_backend="gloo")
    return make_launch(job, run_dir=tmp_path / "run", spare="/scratch/spare_%", states_key="ab" * 32)


def test_each_node_receives_the_address_to_which_it_copies_its_training_states(launch: Launch, capsys: Any) -> None:
    keepers, nodes, folder = StateKeepers(), FakeNodes(), RunFolder(launch.run_dir)
    shells: list[dict[str, str]] = [{}, {}, {}]
    folder.attempt(1).mkdir(parents=True)
    for _ in range(2):
        keepers.look(folder, launch, nodes, shells)  # type: ignore[arg-type]
    assert [command.node_rank for command in nodes.started] == [0, 1]
    assert all(command.is_spare for command in nodes.started)
    assert nodes.files == []
    for rank in (0, 1):
        folder.keeper(1, rank).write_text(json.dumps({"port": 5000 + rank}))
    for _ in range(2):
        keepers.look(folder, launch, nodes, shells)  # type: ignore[arg-type]
    addresses = [node.address for node in launch.nodes]
    assert nodes.files == [
        (2, "/scratch/spare_2_states.next", [addresses[0], 5000]),
        (0, "/scratch/spare_0_states.next", [addresses[1], 5001]),
    ]
    keepers.ended(ProcessExit(pid=101, node_rank=1, exit_code=137, time=0.0), launch)
    said = capsys.readouterr().out
    assert f"node {launch.nodes[2].name} keeps no states in memory: it is gone" in said
    assert (
        f"node {launch.nodes[1].name} keeps no states in memory any more: the process ended with exit code 137" in said
    )
    # The key is in the environment only, which other users can't read.
    for command in nodes.started:
        assert command.environment["PACELINE_STATES_KEY"] == launch.states_key
        assert not any(launch.states_key in word for word in command.argv)


def test_run_on_one_machine_starts_no_process_that_keeps_training_states(launch: Launch) -> None:
    keepers, nodes = StateKeepers(), FakeNodes()
    keepers.look(RunFolder(launch.run_dir), replace(launch, states_key=""), nodes, [{}, {}, {}])  # type: ignore[arg-type]
    assert (nodes.started, nodes.files) == ([], [])
