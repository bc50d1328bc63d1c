"""The user's line that runs now, for messages and graph nodes, and pauses of the profiler."""

from __future__ import annotations

import contextlib
import linecache
import sys
import sysconfig
import traceback
import types
from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

#: A file and a line number.
Line = tuple[str, int]

_SITE = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_STANDARD = sysconfig.get_path("stdlib")
_OWN = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_PASSED_OVER = (_TORCH, _OWN, "<frozen", "<string>", "<eval_with_key>")


@lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Return True if a file belongs neither to torch, nor to us, nor to the standard library."""
    if file.startswith(_PASSED_OVER):
        return False
    return file.startswith(_SITE) or not file.startswith(_STANDARD)


def users_line() -> Line | None:
    """Return the innermost user's line in the call stack."""
    frame = _users_frame(sys._getframe(1))
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _users_frame(frame: types.FrameType | None) -> types.FrameType | None:
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def shown(line: Line | None) -> str:
    """Return `file:line: source`."""
    if line is None:
        return "in its forward"
    source = linecache.getline(*line).strip()
    return f"{line[0]}:{line[1]}: `{source}`" if source else f"{line[0]}:{line[1]}"


def find_line(run: Callable[[], Any], probe: Callable[[], Hashable], is_outer: Callable[[], bool]) -> Line | None:
    """Return the line after which `probe` first changes while `run` runs, or None.

    It is slow, for errors only. Exceptions of `run` are ignored. `is_outer` says whether current lines count.
    """
    start = probe()
    last: list[Line] = []
    found: list[Line] = []

    def in_frame(frame: types.FrameType, event: str, _: object) -> object:
        if not found and is_outer():
            if last and probe() != start:
                found.append(last[-1])
            # After a return, the rest of the calling line runs.
            now = _users_frame(frame.f_back) if event == "return" else frame
            last[:] = [] if now is None else [(now.f_code.co_filename, now.f_lineno)]
        return in_frame

    def at_call(frame: types.FrameType, event: str, _: object) -> Any:
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
    """Pause the profile function: fake tensors make thousands of calls, which it would slow."""
    before = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        put_back(before)


def put_back(profiler: Any) -> None:
    """Restore a profiler from `sys.getprofile`."""
    if profiler is None or callable(profiler):
        sys.setprofile(profiler)
    else:
        # Before Python 3.12 cProfile's profiler is not callable, and must install itself.
        sys.setprofile(None)
        profiler.enable()


def error_line(error: BaseException) -> str:
    """Return `file:line: source` of the innermost user's line.

    Without one, return "in its backward pass".
    """
    found = "in its backward pass"
    # From the outermost frame inwards: the last user's line wins.
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _OWN)):
            found = shown((file, line))
    return found
