"""Run a build's programs: forward output, mask secrets, and end the programs with their parent."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from paceline.errors import EnvironmentBuildError
from paceline.job.secret_values import hidden
from paceline.system import processes

#: Function that is called with each line of a build's output.
Say: TypeAlias = "Callable[[str], None]"

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    say: Say,
    *,
    lock_fd: int | None = None,
    secrets: Iterable[str] = (),
    stdin: str | None = None,
) -> tuple[int, list[str]]:
    """Run a program. Return its exit code and output lines.

    Args:
        command: Program and arguments.
        environment: Variables of the program.
        say: Called with each line.
        lock_fd: A locked file that the program and its children inherit. The lock is free once all of them have ended.
        secrets: Values to mask in the output. Credentials in URLs are always masked.
        stdin: Text for the program's standard input. None: no input.

    Raises:
        EnvironmentBuildError: The program can't be started.
    """
    secrets = tuple(secrets)
    try:
        process = subprocess.Popen(
            command,
            env=dict(environment),
            cwd="/",
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
            # The lock belongs to the open file, so it lasts while any program of the build has this file open.
            pass_fds=() if lock_fd is None else (lock_fd,),
            # End the program with its parent: an orphaned build would write into the next build's files. If there are threads, a
            # preexec_fn can deadlock, but this one takes no lock. The calling thread outlives the program, as prctl requires.
            preexec_fn=processes.ends_with_parent(),  # noqa: PLW1509
        )
    except OSError as error:
        raise EnvironmentBuildError(f"{command[0]!r} could not be started: {error.strerror}.") from error
    lines: list[str] = []
    try:
        if stdin is not None:
            assert process.stdin is not None
            # Ignore the broken pipe of a program that ends before it reads its input: its exit code and output have the reason.
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                pipe.write(stdin)
        assert process.stdout is not None
        for raw in process.stdout:
            # Mask secrets first, because the line goes to the terminal, a log file and perhaps an error message.
            line = hidden(_ESCAPES.sub("", raw).rstrip(), secrets)
            lines.append(line)
            if line:
                say(line)
        return process.wait(), lines
    except BaseException:
        # End the program after Ctrl-C or an error in `say`. On SIGTERM, pip and uv remove their temporary files.
        process.terminate()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    finally:
        if process.poll() is None:
            process.kill()
        if process.stdout is not None:
            process.stdout.close()
        process.wait()
