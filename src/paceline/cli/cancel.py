"""cancel, exec: end runs, and run a command beside a worker."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator

from paceline.cli.common import folder_of, print_json
from paceline.cli.options import JSON, VerbOption, takes
from paceline.cli.summary import summary
from paceline.errors import EngineError, TargetError
from paceline.runs import read, remote_status, states
from paceline.runs.execute import Beside
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, user_name
from paceline.system.signals import handled

_CHUNK = 1 << 15


@takes(
    VerbOption("run_ids", "Runs, or the beginnings of their ids.", type=list, complete="run_ids", needed=True),
    VerbOption("--wait", "Return only when they have ended.", type=bool),
    VerbOption("--force", "Write down as Canceled those whose engine can't be asked any more.", type=bool),
    JSON,
)
def cancel(*, run_ids: list[str], wait: bool, force: bool, as_json: bool) -> None:
    """End runs: SIGTERM to their workers, after the grace period SIGKILL. A run that has ended stays as it is."""
    folders = [folder_of(run_id) for run_id in run_ids]
    for folder in folders:
        record = read.record(folder)
        if record.is_terminal:
            print(f"{folder.run_id} is {record.status} already.", file=sys.stderr)
        elif force and record.status == states.NOT_RESPONDING:
            with contextlib.suppress(EngineError, TargetError):  # it can't be told either
                read.request_cancel(folder, by=user_name())
            remote_status.write_off(folder, by=user_name())
            if not as_json:
                print(
                    f"{folder.run_id}: written off as Canceled; what of it still runs ends when its supervisor sees that"
                )
        else:
            _request(folder, record)
            if not as_json:
                print(f"{folder.run_id}: cancel requested")
    # Each look also writes the end of a run whose supervisor was killed, so there is something to wait for.
    while wait and not all(read.record(folder).is_terminal for folder in folders):
        time.sleep(0.05)
    if wait and not as_json:
        for folder in folders:
            print(f"{folder.run_id}: {read.record(folder).status}")
    if as_json:
        print_json([{key: found[key] for key in ("run_id", "status")} for found in map(summary, folders)])


def _request(folder: RunFolder, record: RunRecord) -> None:
    try:
        read.request_cancel(folder, by=user_name())
    except (EngineError, TargetError) as error:
        if record.status != states.NOT_RESPONDING:
            raise
        hint = f"If it is gone for good: paceline cancel --force {folder.run_id}"
        raise type(error)(f"{str(error).rstrip('.')}. {hint}") from error


@takes(
    VerbOption("run_id", "A run that runs.", "RUN", complete="run_ids", needed=True),
    VerbOption("command", "The command and its arguments.", "-- COMMAND", list, needed=True),
    VerbOption("--rank", "Beside this worker.", type=int, least=0, default=0),
    VerbOption("--no-terminal", "Pipes, also where there is a terminal here.", type=bool),
)
def execute(*, run_id: str, command: list[str], rank: int, no_terminal: bool) -> int:
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
