"""A shell command that is killed with its descendants when this process ends for any reason."""

from __future__ import annotations

import codecs
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from paceline.compat.horovod.runner.util.threads import in_thread, on_event
from paceline.system import processes

#: Seconds between SIGTERM and SIGKILL when a command must end.
GRACEFUL_TERMINATION_TIME_S = 5
_BESIDE = str(Path(__file__).with_name("beside_shell.py"))


def execute(
    command: str | Sequence[str],
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    index: Any = None,
    events: Sequence[threading.Event] | None = None,
    prefix_output_with_timestamp: bool = False,
) -> int:
    """Run a command, forward its output, and return its exit code.

    The exit code is 128+n if signal n ended the command. Output goes to `stdout` and `stderr`, by default this
    process's streams. If `index` is given, lines get the prefix `[index]<stdout>:`. When one of `events` is set, or
    this process ends in any way, the command and its descendants get SIGTERM, and after five seconds SIGKILL.
    """
    argv = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
    # When this process ends, the standard input of `beside_shell.py` closes. Then `beside_shell.py` ends the command.
    beside = subprocess.Popen(
        # Start faster: -S skips site-packages, which the script does not need.
        [sys.executable, "-S", _BESIDE, str(GRACEFUL_TERMINATION_TIME_S), *argv],
        env=None if env is None else dict(env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert beside.stdin is not None
    line, lock = beside.stdin, threading.Lock()

    def end() -> None:
        with lock:
            line.close()

    readers = [
        in_thread(_forward, (source, target or default, name, index, prefix_output_with_timestamp))
        for source, target, default, name in (
            (beside.stdout, stdout, sys.stdout, "stdout"),
            (beside.stderr, stderr, sys.stderr, "stderr"),
        )
    ]
    stop = threading.Event()
    for event in events or ():
        on_event(event, end, stop=stop, check_stop_interval_s=0.1, silent=True)
    try:
        code = beside.wait()
    # The command must end before this call does, even after KeyboardInterrupt.
    except BaseException:
        end()
        beside.wait()
        raise
    finally:
        stop.set()
        for reader in readers:
            reader.join()
        end()
    return processes.shell_code(code)


def _forward(source: IO[bytes], target: Any, name: str, index: Any, is_timed: bool) -> None:
    decoder, left = codecs.getincrementaldecoder("utf-8")("replace"), ""

    def write(text: str) -> None:
        when = time.asctime() if is_timed else ""
        target.write(text if index is None else f"{when}[{index}]<{name}>:{text}")
        target.flush()

    with source:
        while data := os.read(source.fileno(), 1 << 16):
            # Also split after each "\r", so that a progress bar is shown while it moves.
            *lines, left = re.split("(?<=[\r\n])", left + decoder.decode(data))
            for text in lines:
                write(text)
    if left := left + decoder.decode(b"", final=True):
        write(left)
