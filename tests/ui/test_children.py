"""Processes that read foreign content for the page end with their reader, and at their limit."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from paceline.ui import children
from paceline.ui.markup import render_markdown

#: A module that prints its standard input once the input has ended.
_READER = ["json.tool"]


class _GoneError(Exception):
    pass


def _leave() -> None:
    raise _GoneError


@pytest.fixture
def endless() -> Iterator[int]:
    """The reading end of a pipe that stays open."""
    reading, writing = os.pipe()
    yield reading
    os.close(reading)
    os.close(writing)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    processes: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **options)  # type: ignore[call-overload]
            processes.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    return processes


def test_preview_process_ends_when_its_client_disconnects(endless: int, started: list[subprocess.Popen[bytes]]) -> None:
    with pytest.raises(_GoneError):
        children.output_of(_READER, 600.0, _leave, stdin=endless)
    assert [process.returncode for process in started] == [-9]


def test_preview_process_is_killed_at_its_time_limit(endless: int, started: list[subprocess.Popen[bytes]]) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        children.output_of(_READER, 0.1, lambda: None, stdin=endless)
    assert [process.returncode for process in started] == [-9]


def test_long_notes_are_shown_in_part() -> None:
    note = '<p class="note">The page shows the first 3 of 4 characters.</p>'
    assert render_markdown("abcd", longest=3) == f"<p>abc</p>\n{note}"
    assert render_markdown("abc", longest=3) == "<p>abc</p>\n"
