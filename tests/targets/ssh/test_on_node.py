"""The program that keeps the books of a machine, run as a node's Python runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.targets.ssh.looking import answer_in, program

Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(tmp_path: Path) -> Ask:
    """Asks the program, with the books in `tmp_path`."""

    def run(verb: str, environment: dict[str, str] | None = None, **given: Any) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-", verb, json.dumps(given)],
            input=program(),
            capture_output=True,
            check=True,
            env={**os.environ, "PACELINE_LEASES": str(tmp_path / "leases"), **(environment or {})},
        )
        answer = answer_in(b"welcome!\n" + done.stdout + b"bye\n")
        assert answer is not None
        return answer

    return run


@pytest.fixture
def agents() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts stand-ins for agents."""
    started = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "600"]))
        return started[-1]

    yield start
    for agent in started:
        agent.kill()
        agent.wait()


def ticket(key: str, agent: subprocess.Popen[bytes], cores: int = 1, gpus: int = 0, **values: Any) -> dict[str, Any]:
    asked = {"key": key, "run_id": f"run {key}", "pid": agent.pid, "cores": cores, "gpu_count": gpus}
    return asked | {"all_cores": 4, "all_gpus": ["0", "3"]} | values


def test_runs_share_a_machine_until_it_is_full_and_no_two_get_one_gpu(ask: Ask, agents: Any) -> None:
    first = ask("take", **ticket("1", agents(), cores=2, gpus=1))
    second = ask("take", **ticket("2", agents(), cores=2, gpus=1))
    third = ask("take", **ticket("3", agents(), cores=1))

    assert (first["granted"], second["granted"]) == ({"gpus": ["0"]}, {"gpus": ["3"]})
    assert "granted" not in third
    assert [holder["run_id"] for holder in third["holders"]] == ["run 1", "run 2"]


def test_the_older_submission_comes_first_and_is_not_overtaken(ask: Ask, agents: Any) -> None:
    holder, old, young = agents(), agents(), agents()
    ask("take", **ticket("1", holder, cores=3))
    assert "granted" not in ask("take", **ticket("2", old, cores=4))
    assert ask("take", **ticket("3", young, cores=1))["ahead"][0]["run_id"] == "run 2"

    holder.kill()
    holder.wait()

    assert "granted" not in ask("take", **ticket("3", young, cores=1)), "there is room, but it is not its turn"
    assert ask("take", **ticket("2", old, cores=4))["granted"] == {"gpus": []}


def test_whoever_only_tries_leaves_no_place_in_the_queue(ask: Ask, agents: Any) -> None:
    ask("take", **ticket("2", agents(), cores=4))
    assert "granted" not in ask("take", at_once=True, **ticket("1", agents()))

    assert [item["key"] for item in ask("look")["tickets"]] == ["2"]


def test_what_is_given_back_is_free(ask: Ask, agents: Any) -> None:
    holder = agents()
    ask("take", **ticket("1", holder, cores=4))
    assert ask("take", **ticket("1", holder, cores=4))["granted"] == {"gpus": []}, "asked again, the same"
    ask("give_back", key="1")
    ask("give_back", key="1")

    assert ask("look")["tickets"] == []


def test_a_dead_agent_holds_nothing_whatever_it_left(ask: Ask, agents: Any, tmp_path: Path) -> None:
    holder = agents()
    ask("take", **ticket("1", holder, cores=4))
    holder.kill()  # and nobody has waited for it
    (folder,) = (tmp_path / "leases").iterdir()
    (folder / "torn.ticket").write_text('{"key": ')
    (folder / "2.ticket.77.new").write_text("half")
    other_boot = ticket("3", agents(), boot_id="another", started="1", granted={"gpus": []})
    (folder / "3.ticket").write_text(json.dumps(other_boot))

    assert ask("look")["tickets"] == []
    assert [path.name for path in folder.iterdir()] == ["guard"]


def test_another_process_of_the_same_number_is_not_the_agent(ask: Ask, agents: Any, tmp_path: Path) -> None:
    ask("take", **ticket("1", agents()))
    (path,) = (tmp_path / "leases").glob("*/1.ticket")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"started": "12"}))

    assert ask("look")["tickets"] == []


def test_the_folder_is_for_everybody(ask: Ask, agents: Any, tmp_path: Path) -> None:
    previous = os.umask(0o077)
    try:
        ask("take", **ticket("1", agents()))
    finally:
        os.umask(previous)

    (folder,) = (tmp_path / "leases").iterdir()
    assert [path.stat().st_mode & 0o7777 for path in (folder.parent, folder)] == [0o1777, 0o1777]
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}


def test_a_look_says_what_there_is(ask: Ask) -> None:
    found = ask("look", {"PACELINE_GPUS": "2,5"}, with_gpus=True)

    assert found["cores"] == len(os.sched_getaffinity(0))
    assert found["gpus"] == ["2", "5"]
    assert tuple(found["python"][1:3]) == sys.version_info[:2]
    assert "gpus" not in ask("look")


def test_a_disk_without_room_is_told(ask: Ask, agents: Any, tmp_path: Path) -> None:
    (tmp_path / "leases").write_text("in the way")
    assert "Not a directory" in ask("take", **ticket("1", agents()))["error"]


def test_an_old_python_can_read_the_program() -> None:
    import ast

    ast.parse(program(), feature_version=(3, 6))
