"""Ranks that a program inside a run starts by itself: Paceline recognises them, and marks the lines that they print.

A launcher's variables tell the rank when the interpreter starts; a process that has none tells it when it joins a process
group of torch (`mp.spawn`, `ddp_spawn`). Such a rank logs its metrics as that rank of the run, and `[rank 1]` stands before
each line that it writes into the worker's log. Output that a launcher redirects stays as it is.
"""

from __future__ import annotations

import os
import sys

from paceline.system.nested import OUTPUT_VARIABLE, VARIABLE, nested_rank

# Not typing's: a worker loads this before its script.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any, TextIO

_C10D = "torch.distributed.distributed_c10d"


def begin_worker(environ: dict[str, str] | os._Environ[str] = os.environ) -> None:
    """Prepare a worker of the run for ranks below it."""
    environ[OUTPUT_VARIABLE] = _file(1)
    # Workers of several have joined each other, and are followed by `paceline.collectives.recorder`.
    if environ.get("PACELINE_WORLD_SIZE") == "1":
        _follow_torch()


def begin_below() -> None:
    """Prepare a Python process below a worker: its trackers are heard, and its rank is recognised. Called by `sitecustomize`."""
    from paceline.trackers import hooks

    hooks.install()
    if nested_rank() is not None:
        _mark_output()
    else:
        _follow_torch()


def _follow_torch() -> None:
    from paceline.system.when_loaded import when_loaded

    when_loaded(_C10D, _listen)


def _listen(module: ModuleType) -> None:
    import functools

    made = module.init_process_group

    @functools.wraps(made)
    def init_process_group(*given: Any, **options: Any) -> Any:
        result = made(*given, **options)
        try:
            _joined(module.get_rank(), module.get_world_size())
        except Exception:  # a backend that tells no rank: the script goes on as without Paceline
            pass
        return result

    module.init_process_group = init_process_group  # type: ignore[attr-defined]


def _joined(rank: int, size: int) -> None:
    if size > 1 and nested_rank() is None:
        os.environ[VARIABLE] = f"{rank}/{size}"
        _mark_output()


def _mark_output() -> None:
    """Put this process's rank before each line that it writes into the worker's log."""
    found = nested_rank()
    assert found is not None, "called for a rank"
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if _is_plain(stream, number) and _file(number) == os.environ.get(OUTPUT_VARIABLE):
            stream.flush()
            marked = _marked(stream, f"[rank {found[0]}] ")
            setattr(sys, name, marked)
            setattr(sys, f"__{name}__", marked)


def _is_plain(stream: Any, number: int) -> bool:
    try:
        return stream is not None and hasattr(stream, "buffer") and bool(stream.fileno() == number)
    except (OSError, ValueError):
        return False


def _file(number: int) -> str:
    try:
        found = os.fstat(number)
    except OSError:
        return ""
    return f"{found.st_dev}:{found.st_ino}"


def _marked(stream: Any, mark: str) -> TextIO:
    import io
    import re

    behind_return = re.compile(r"\r(?=[^\r\n])")

    class MarkedLines(io.TextIOWrapper):
        """A text stream that begins each line with `mark`, and writes whole lines at once: several ranks share the file."""

        _line = ""
        _is_begun = False

        def write(self, text: str) -> int:
            *whole, self._line = (self._line + text).split("\n")
            if whole:
                self._put(
                    "".join(f"{mark if at or not self._is_begun else ''}{line}\n" for at, line in enumerate(whole))
                )
                self._is_begun = False
            return len(text)

        def flush(self) -> None:
            if self._line:
                self._put(f"{'' if self._is_begun else mark}{self._line}")
                self._line, self._is_begun = "", True
            super().flush()

        def _put(self, text: str) -> None:
            # A progress bar's states replace each other from the line's beginning on.
            super().write(behind_return.sub(f"\r{mark}", text))
            super().flush()

    made = MarkedLines(
        stream.buffer, stream.encoding, stream.errors, newline="\n", line_buffering=stream.line_buffering
    )
    made._unmarked = stream  # type: ignore[attr-defined] # once it is collected, it closes what both write into
    return made
