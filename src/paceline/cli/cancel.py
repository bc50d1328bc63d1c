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
from typing import TYPE_CHECKING

from paceline.cli.common import folder_of, print_json
from paceline.cli.options import JSON, VerbOption, takes
from paceline.errors import EngineError, TargetError
from paceline.runs import read, remote_status, states
from paceline.runs.execute import Beside
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, user_name
from paceline.system.signals import handled

if TYPE_CHECKING:
    from paceline.cli.outputs import CanceledRun

_CHUNK = 1 << 15


@takes(
    VerbOption(
        "run_ids",
        "Runs: their ids, the beginnings of these, or their names.",
        type=list,
        complete="run_ids",
        needed=True,
    ),
    VerbOption("--wait", "Return when the runs have ended.", type=bool),
    VerbOption("--force", "Record runs as Canceled if their engine no longer answers.", type=bool),
    JSON,
)
def cancel(*, run_ids: list[str], wait: bool, force: bool, as_json: bool) -> None:
    """End runs, after a grace period for their workers. These get SIGTERM, then SIGKILL."""
    folders = [folder_of(run_id) for run_id in run_ids]
    for folder in folders:
        record = read.record(folder)
        if record.is_terminal:
            print(f"{folder.run_id} is {record.status} already.", file=sys.stderr)
        elif force and record.status == states.NOT_RESPONDING:
            with contextlib.suppress(EngineError, TargetError):  # continue below if the engine can't stop the run
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
    # If a run's supervisor was killed, `read.record` records the run's end, so this loop always ends.
    while wait and not all(read.record(folder).is_terminal for folder in folders):
        time.sleep(0.05)
    if wait and not as_json:
        for folder in folders:
            print(f"{folder.run_id}: {read.record(folder).status}")
    if as_json:
        rows: list[CanceledRun] = [
            {"run_id": folder.run_id, "status": read.record(folder).status} for folder in folders
        ]
        print_json(rows)


def _request(folder: RunFolder, record: RunRecord) -> None:
    try:
        read.request_cancel(folder, by=user_name())
    except (EngineError, TargetError) as error:
        if record.status != states.NOT_RESPONDING:
            raise
        hint = f"If it is gone for good: paceline cancel --force {folder.run_id}"
        raise type(error)(f"{str(error).rstrip('.')}. {hint}") from error


@takes(
    VerbOption("run_id", "A running run.", "RUN", complete="run_ids", needed=True),
    VerbOption("command", "The command and its arguments.", "-- COMMAND", list, needed=True),
    VerbOption("--rank", "The worker beside which the command runs.", type=int, least=0, default=0),
    VerbOption("--no-terminal", "Use pipes, even on a terminal.", type=bool),
)
def execute(*, run_id: str, command: list[str], rank: int, no_terminal: bool) -> int:
    """Run a command on a worker's node, with its variables.

    Uses the worker's folder, container and, if there is one here, your terminal. It ends with the run or this program. Returns
    the command's exit code.
    """
    folder = folder_of(run_id)
    terminal = None
    # Like ssh, give the command a terminal if standard input and output are terminals. Otherwise pass its output on unchanged.
    if not no_terminal and sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty():
        terminal = _size()
    fd: int | None = None
    # Standard input may be missing or have no file descriptor, as in a test. Then continue without a descriptor.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        fd = sys.stdin.fileno()
    # The signal handler only notes that the terminal's size has changed: a message sent from it could split another message.
    resized: list[int] = []
    with (
        Beside(folder, command, rank=rank, terminal=terminal, term=os.environ.get("TERM")) as beside,
        _raw(fd if terminal else None),
        # Handle SIGTERM and SIGHUP like Ctrl-C, so that the supervisor ends the command, too.
        handled(end, signal.SIGTERM, signal.SIGHUP),
    ):
        if terminal:
            signal.signal(signal.SIGWINCH, lambda *_: resized.append(1))
        # Without standard input, tell the command at once that its input has ended. A command that reads it would wait.
        if fd is None:
            beside.end_input()
        while beside.exit_code is None:
            # Send input that has already arrived, and don't wait for more: `heard` below waits for the command's output and end.
            fd = _pass_on(beside, fd)
            if resized:
                resized.clear()
                beside.resize(*_size())
            for name, data in beside.heard():
                # Write bytes, because the command's output may not be valid text.
                out = sys.stdout.buffer if name == "out" else sys.stderr.buffer
                out.write(data)
                out.flush()
    return beside.exit_code


def _pass_on(beside: Beside, fd: int | None) -> int | None:
    """Send pending terminal input (`fd`) to the command. Return None at the input's end, else `fd`."""
    # `os.read` works for a terminal in raw mode, a pipe and a file.
    if fd is None or not select.select([fd], [], [], 0)[0]:
        return fd
    try:
        data = os.read(fd, _CHUNK)
    # A closed terminal raises EIO, which counts as the end of the input.
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
    if fd is None:
        yield
        return
    import termios
    import tty

    # Restore the terminal's mode at the end: in raw mode the user's shell would not show what the user types.
    before = termios.tcgetattr(fd)
    try:
        tty.setraw(fd)
        yield
    finally:
        # With TCSADRAIN, wait until pending output is written. Otherwise its line ends would change with the terminal's mode.
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def end(number: int, frame: object) -> None:
    """Handle a signal: exit with 128 + its number, as shells do."""
    # Raise an exception: the context managers of the command then restore the terminal and report the end to the run.
    raise SystemExit(128 + number)
