"""exec: a command beside a worker of a run that runs."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from paceline.cli import completing
from paceline.cli.common import folder_of
from paceline.runs.execute import Beside
from paceline.system.signals import handled

_CHUNK = 1 << 15


def execute(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="A run that runs.", autocompletion=completing.run_ids)],
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="The command and its arguments.")],
    rank: Annotated[int, typer.Option("--rank", min=0, help="Beside this worker.")] = 0,
    no_terminal: Annotated[
        bool, typer.Option("--no-terminal", help="Pipes, also where there is a terminal here.")
    ] = False,
) -> int:
    """Run a command on a worker's node, in its working folder and container, with its environment variables.

    It has a terminal if there is one here, and its exit code is passed on. It ends with the run, or when this is ended.
    """
    folder = folder_of(run_id)
    terminal = None
    # As ssh does: with a terminal on both sides the command gets one too, else output stays byte for byte.
    if not no_terminal and sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty():
        terminal = _size()
    fd: int | None = None
    # A program without a terminal may have no standard input at all, and that of a test has no descriptor.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        fd = sys.stdin.fileno()
    # The handler only notes it: sending from a signal handler could meet a half-sent message of the loop below.
    resized: list[int] = []
    with (
        Beside(folder, command, rank=rank, terminal=terminal, term=os.environ.get("TERM")) as beside,
        _raw(fd if terminal else None),
        # They end this as Ctrl-C does, so that the command is told.
        handled(_end, signal.SIGTERM, signal.SIGHUP),
    ):
        if terminal:
            signal.signal(signal.SIGWINCH, lambda *_: resized.append(1))
        # There is no input at all (closed, or a test's): a command that reads must see its end at once.
        if fd is None:
            beside.end_input()
        while beside.exit_code is None:
            # Input is only looked at, never waited for: `heard` below waits for both, the command's output and its end.
            fd = _pass_on(beside, fd)
            if resized:
                resized.clear()
                beside.resize(*_size())
            for name, data in beside.heard():
                # In bytes, for a command may print what is no text.
                out = sys.stdout.buffer if name == "out" else sys.stderr.buffer
                out.write(data)
                out.flush()
    return beside.exit_code


def _pass_on(beside: Beside, fd: int | None) -> int | None:
    """Pass on what was typed, if anything was; where it comes from, None once that has ended."""
    # A terminal in raw mode, a pipe and a file alike: what is there now, at most one piece.
    if fd is None or not select.select([fd], [], [], 0)[0]:
        return fd
    try:
        data = os.read(fd, _CHUNK)
    # Reading from a terminal that was closed fails with EIO.
    except OSError:
        data = b""
    if data:
        beside.write(data)
        return fd
    beside.end_input()
    return None


def _size() -> tuple[int, int]:
    found = shutil.get_terminal_size()
    return found.lines, found.columns


@contextlib.contextmanager
def _raw(fd: int | None) -> Iterator[None]:
    """A terminal that hands every key on, Ctrl-C too."""
    if fd is None:
        yield
        return
    import termios
    import tty

    # Restored however this ends: a shell that is left in raw mode shows nothing of what is typed.
    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd)
        yield
    finally:
        # After the output that is still on its way has been written: in cooked mode its line ends would change.
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _end(number: int, frame: object) -> None:
    # An exception, so that the contexts above restore the terminal and tell the run.
    raise SystemExit(128 + number)
