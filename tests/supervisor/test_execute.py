"""Requests of `paceline exec`, as the supervisor takes them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.runs.folder import RunFolder
from paceline.supervisor.execute import ExecCommands
from paceline.system.files import write_json

REQUEST = {"argv": ["id"], "rank": 0}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "runs" / "a_1_00000000")
    folder.logs.mkdir(parents=True)
    return folder


def started(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The requests that the supervisor follows."""
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(ExecCommands, "_start", lambda _, name, request: found.append(request))
    launch: Any = SimpleNamespace(run_dir=folder.path)
    nothing: Any = None
    ExecCommands(launch, folder, nothing, [], bool, nothing).look()
    return found


def ask(path: Path) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.mkdir(mode=0o700)
    write_json(path / "request.json", REQUEST)


def test_exec_request_of_the_owner_is_executed(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(folder.exec_requests / "x")
    assert started(folder, monkeypatch) == [REQUEST]


@pytest.mark.promise("folder-takes-place-request-paceline")
@pytest.mark.parametrize("swap", ["a link", "a folder"])
def test_folder_in_place_of_a_request_is_not_touched(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, swap: str
) -> None:
    # Regression: after the supervisor's check, a member of the group replaced a request's folder by a link to a folder
    # of the run's owner.
    path, own = folder.exec_requests / "x", tmp_path / "own"
    ask(path)
    ask(own)

    def start(commands: ExecCommands, name: str, request: dict[str, Any]) -> None:
        path.rename(path.with_name(".taken"))
        path.symlink_to(own) if swap == "a link" else own.rename(path)
        commands._answer(name)
        commands._forget(name)

    monkeypatch.setattr(ExecCommands, "_start", start)
    (folder.path / "attempts/1").mkdir(parents=True)
    launch: Any = SimpleNamespace(run_dir=folder.path, attempt=1)
    nothing: Any = None
    ExecCommands(launch, folder, nothing, [], bool, nothing).look()
    assert [name.name for name in path.resolve().iterdir()] == ["request.json"], "it got no answer, and was not removed"
    assert list(path.with_name(".taken").iterdir()) == [], "the one that was taken was emptied"


def link_to_folder(folder: RunFolder, own: Path) -> None:
    ask(own / "x")
    folder.exec_requests.mkdir(mode=0o700)
    (folder.exec_requests / "x").symlink_to(own / "x")


def link_to_all(folder: RunFolder, own: Path) -> None:
    ask(own / "x")
    folder.exec_requests.symlink_to(own)


def link_to_file(folder: RunFolder, own: Path) -> None:
    ask(own / "x")
    (folder.exec_requests / "x").mkdir(parents=True, mode=0o700)
    folder.exec_requests.chmod(0o700)
    (folder.exec_requests / "x" / "request.json").symlink_to(own / "x" / "request.json")


def open_to_group(folder: RunFolder, own: Path) -> None:
    ask(folder.exec_requests / "x")
    (folder.exec_requests / "x").chmod(0o770)


def all_open_to_group(folder: RunFolder, own: Path) -> None:
    ask(folder.exec_requests / "x")
    folder.exec_requests.chmod(0o770)


def of_another_user(folder: RunFolder, own: Path) -> None:
    ask(folder.exec_requests / "x")


@pytest.mark.promise("shared-workspace-nobody-runs-command")
@pytest.mark.parametrize(
    "forge", [link_to_folder, link_to_all, link_to_file, open_to_group, all_open_to_group, of_another_user]
)
def test_request_that_another_user_could_have_made_is_refused(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forge: Any
) -> None:
    own = tmp_path / "own"
    forge(folder, own)
    if forge is of_another_user:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert started(folder, monkeypatch) == []
    assert not list(tmp_path.rglob("answer.json")), "no answer is written behind a link"


def test_supervisor_polls_more_often_after_it_sent_an_exec_message_to_a_node(folder: RunFolder) -> None:
    sent: list[bytes] = []
    nodes: Any = SimpleNamespace(put=lambda node_rank, path, data: sent.append(data))
    launch: Any = SimpleNamespace(run_dir=folder.path)
    nothing: Any = None
    commands = ExecCommands(launch, folder, nodes, [], bool, nothing)
    assert commands.pause_s(0.1) == 0.1
    one: Any = SimpleNamespace(node_rank=0, id="x", sent=0)
    commands._pass_on(one, b"message")
    assert commands.pause_s(0.1) < 0.05
    assert commands.pause_s(0.001) == 0.001
    assert sent == [b"message"]
