"""A service that a run serves on another machine: the lines taken over from its log."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.runs.folder import RunFolder
from paceline.services.remote_server import RemoteServer, _Served


def test_remote_server_log_is_printed_attempt_by_attempt_and_an_output_error_is_ignored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, served = object.__new__(RemoteServer), _Served("1.1", RunFolder(tmp_path / "e_1"), 0)
    record: Any = SimpleNamespace(attempts=[])

    def prints(number: int, text: str) -> None:
        path = served.folder.rank_log(number, 0)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    server._show(served, record)
    for number in (1, 2):
        record.attempts.append(SimpleNamespace(number=number))
        server._show(served, record)  # the attempt has not printed anything yet
        prints(number, f"line of {number}\nbegun")
        server._show(served, record)
    assert capsys.readouterr().out == "line of 1\nline of 2\n"
    prints(2, "line of 2\none more\n")
    with monkeypatch.context() as patch, open("/dev/full", "w") as full:
        patch.setattr(sys, "stdout", full)
        server._show(served, record)
        with contextlib.suppress(OSError):
            full.close()
