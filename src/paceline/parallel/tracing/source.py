"""Find the user's line of code that runs now, for messages and graph nodes; and pause Python's profiler."""

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
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from _typeshed import TraceFunction

#: A file and a line number.
Line = tuple[str, int]

_SITE = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_STANDARD = sysconfig.get_path("stdlib")
_OWN = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_PASSED_OVER = (_TORCH, _OWN, "<frozen", "<string>", "<eval_with_key>")


@lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Return whether a file is the user's code, not Python's, torch's or Paceline's."""
    return not file.startswith(_PASSED_OVER) and not (file.startswith(_STANDARD) and not file.startswith(_SITE))


def users_line() -> Line | None:
    """Return the innermost line of user code in the call stack, or None."""
    frame = _users_frame(sys._getframe(1))
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _users_frame(frame: types.FrameType | None) -> types.FrameType | None:
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def shown(line: Line | None) -> str:
    """Return a line of code as text: `file:line: source`."""
    if line is None:
        return "in its forward"
    source = linecache.getline(*line).strip()
    return f"{line[0]}:{line[1]}: `{source}`" if source else f"{line[0]}:{line[1]}"


def find_line(run: Callable[[], object], probe: Callable[[], Hashable], is_outer: Callable[[], bool]) -> Line | None:
    """Call `run`, and return the user's line that first changes the result of `probe()`.

    This is slow, so use it only for error messages. Exceptions of `run` are ignored. Lines count only while `is_outer()` is
    True. Return None if no line is found.
    """
    start = probe()
    last: list[Line] = []
    lines: list[Line] = []

    def look() -> None:
        lines.extend(last if last and probe() != start else [])

    def in_frame(frame: types.FrameType, event: str, _: object) -> TraceFunction:
        if not lines and is_outer():
            look()
            # When a function returns, Python continues in the caller, so note the caller's line.
            now = _users_frame(frame.f_back) if event == "return" else frame
            last[:] = [] if now is None else [(now.f_code.co_filename, now.f_lineno)]
        return in_frame

    def at_call(frame: types.FrameType, event: str, _: object) -> TraceFunction | None:
        return in_frame if is_users(frame.f_code.co_filename) else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        with contextlib.suppress(Exception):
            run()
    finally:
        sys.settrace(before)
    if not lines:
        look()
    return next(iter(lines), None)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Within the `with` block, disable Python's profiler, which slows fake tensors."""
    before = sys.getprofile()
    sys.setprofile(None)
    try:
        yield
    finally:
        put_back(before)


def put_back(profiler: Any) -> None:
    """Restore Python's profiler to `profiler`, an earlier result of `sys.getprofile`."""
    sys.setprofile(profiler if callable(profiler) else None)
    # Before Python 3.12 cProfile's profiler is not callable, so let the profiler enable itself.
    if not callable(profiler) and profiler is not None:
        profiler.enable()


def error_line(error: BaseException) -> str:
    """Return the innermost line of user code in a traceback: `file:line: source`.

    If the traceback has no such line, as in a backward pass, return "in its backward pass".
    """
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    # A traceback lists frames from the outermost to the innermost, so the last line of user code is the innermost one.
    lines = [line for line in lines if not line[0].startswith((_TORCH, _OWN))]
    return shown(lines[-1]) if lines else "in its backward pass"
