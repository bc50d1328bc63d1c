"""The program of a service's pod unpacks the service, builds its environment, and becomes the server."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import EnvironmentBuildError
from paceline.job.plan import NodeSetup
from paceline.services import pod
from paceline.targets.kubernetes.submission import packed_tree
from paceline.targets.kubernetes.ticket import EXIT_COMPLAINT
from tests.helpers import write_tree


class ReplacedError(Exception):
    """This process would be another program now."""


@pytest.fixture
def ticket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A pod's folders, with a package in two parts and a ticket."""
    data = packed_tree(write_tree(tmp_path / "package", {"start.py": "", "models/0/two.txt": "2"}), ".")
    write_tree(tmp_path / "code", {"package.0": data[:20], "package.1": data[20:]})
    monkeypatch.setattr(pod, "TOP", str(tmp_path / "top"))
    monkeypatch.setattr(pod.site, "main", lambda: None)
    monkeypatch.setattr(pod, "CODE", str(tmp_path / "code"))
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "ticket.json"
    path.write_text(json.dumps({"parts": 2, "environment": {}, "variables": {"PACELINE_KEY": "k"}, "volume": False}))
    return path


def test_pod_becomes_the_server_with_its_keys_in_the_built_environment(
    ticket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    def execve(*words: Any) -> None:
        started.append(words)
        raise ReplacedError

    monkeypatch.setattr(pod, "prepare", lambda *_: (None, NodeSetup(python="/built/python")))
    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setenv("PACELINE_POD_IP", "fd00::1")
    for _ in range(2):  # a container that has ended starts again in the same pod
        with pytest.raises(ReplacedError):
            pod.main(str(ticket), "/library")

    python, words, variables = started[1]
    assert python == words[0] == "/built/python"
    assert words[1:] == [str(tmp_path / "top/service/start.py"), "--host", "::", "--port", "8000", "--workers", "1"]
    assert (variables["PACELINE_KEY"], variables["PYTHONPATH"].split(os.pathsep)[0]) == ("k", "/library")
    assert "PACELINE_POD_IP" not in variables
    assert (tmp_path / "top" / "service" / "models" / "0" / "two.txt").read_text() == "2"


def test_pod_says_why_it_can_not_begin(
    ticket: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(*_: object) -> None:
        raise EnvironmentBuildError("the environment could not be built: no index.")

    monkeypatch.setattr(pod, "prepare", prepare)

    assert pod.main(str(ticket), "/library") == EXIT_COMPLAINT
    assert capsys.readouterr().out == "paceline: the environment could not be built: no index.\n"
