"""The line of the user's that is being run, for messages and for the notes of a graph. Loaded on use: it imports torch."""

from __future__ import annotations

import contextlib
import linecache
import sys
import sysconfig
import types
from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

#: A file and a line's number in it.
Line = tuple[str, int]

_SITE = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_STANDARD = sysconfig.get_path("stdlib")
_OWN = str(Path(__file__).parents[1])
_PASSED_OVER = (str(Path(torch.__file__).parent), _OWN, "<frozen", "<string>", "<eval_with_key>")


@lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """True if a source file is neither torch's, nor ours, nor of the standard library."""
    if file.startswith(_PASSED_OVER):
        return False
    return file.startswith(_SITE) or not file.startswith(_STANDARD)


def users_line() -> Line | None:
    """The innermost line of the user's that the caller was called from."""
    frame = _users_frame(sys._getframe(1))
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _users_frame(frame: types.FrameType | None) -> types.FrameType | None:
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def shown(line: Line | None) -> str:
    """`file:line: source` of that line."""
    if line is None:
        return "in its forward"
    source = linecache.getline(*line).strip()
    return f"{line[0]}:{line[1]}: `{source}`" if source else f"{line[0]}:{line[1]}"


def find_line(run: Callable[[], Any], probe: Callable[[], Hashable], is_outer: Callable[[], bool]) -> Line | None:
    """The line after which `probe` first gives another value while `run` runs; None if it never does.

    Slow: it is for an error that is told once. What `run` raises is left out.
    is_outer: whether lines count that are run now.
    """
    start = probe()
    last: list[Line] = []
    found: list[Line] = []

    def in_frame(frame: types.FrameType, event: str, _: Any) -> Any:
        if not found and is_outer():
            if last and probe() != start:
                found.append(last[-1])
            # Once a function has returned, what runs next is the rest of the line that called it.
            now = _users_frame(frame.f_back) if event == "return" else frame
            last[:] = [] if now is None else [(now.f_code.co_filename, now.f_lineno)]
        return in_frame

    def at_call(frame: types.FrameType, event: str, _: Any) -> Any:
        return in_frame if is_users(frame.f_code.co_filename) else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        with contextlib.suppress(Exception):
            run()
    finally:
        sys.settrace(before)
    if not found and last and probe() != start:
        found.append(last[-1])
    return found[0] if found else None


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Nothing is called until the block ends: fake tensors make thousands of calls, each of which would cost one more."""
    before = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        put_back(before)


def put_back(profiler: Any) -> None:
    """Let it be called again, whatever `sys.getprofile` has given."""
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        # Before Python 3.12 cProfile's profiler is no function, and only it can set itself again.
        sys.setprofile(None)
        profiler.enable()
