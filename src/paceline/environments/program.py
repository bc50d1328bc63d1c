"""Run a program of a build: its output line by line, no secret in it, and no process left when this one ends."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

from paceline.errors import EnvironmentBuildError
from paceline.job.secret_values import hidden
from paceline.system import processes

#: Called with each line of a build's output.
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
    """(exit code, lines) of the program, run in the root folder so that nothing of the working directory is seen.

    lock_fd: an open file that the program and its children hold too, so that its lock is free only once all of them ended.
    secrets: values that are masked in the output beside what URLs hold.

    Raises:
        EnvironmentBuildError: it could not be started.
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
            # The lock is of the open file, so it stays held while any program of the build has it open.
            pass_fds=() if lock_fd is None else (lock_fd,),
            # A build that goes on behind a killed parent would write into what the next one makes. It calls two functions of
            # the C library and takes no lock, so other threads are no danger to it; and this one stays until the program ends.
            preexec_fn=processes.ends_with_parent(),  # noqa: PLW1509
        )
    except OSError as error:
        raise EnvironmentBuildError(f"{command[0]!r} could not be started: {error.strerror}.") from error
    lines: list[str] = []
    try:
        if stdin is not None:
            assert process.stdin is not None
            # A program that ends at once reads nothing; its exit code and its output tell why.
            with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
                pipe.write(stdin)
        assert process.stdout is not None
        for raw in process.stdout:
            # Masked before anybody sees it: the line goes to the terminal, a log file and perhaps an error.
            line = hidden(_ESCAPES.sub("", raw).rstrip(), secrets)
            lines.append(line)
            if line:
                say(line)
        return process.wait(), lines
    except BaseException:
        # Ctrl-C, or an error in `say`: pip and uv remove their temporary files on SIGTERM.
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
