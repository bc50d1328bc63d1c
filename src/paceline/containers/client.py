"""Calls of an engine's client that take their time: lines as they come."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from paceline.containers.engine import ContainerEngine
from paceline.errors import LauncherError

# Enough to find the reason of a failure in; a pull prints a line for each step of each layer, and all of them would pile up.
_KEPT_LINES = 200

_NO_PROGRAM = re.compile(r"executable file not found|executable file .* not found|no such file or directory", re.I)


def call(
    argv: Sequence[str],
    *,
    say: Callable[[str], None] = lambda line: None,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, list[str]]:
    """Exit code and last lines of output, standard error's among them.

    say: is given each line as it comes; where it raises, the client is ended.

    Raises:
        LauncherError: the client can't be started.
    """
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A group of its own: Ctrl-C at the terminal is the run's affair, and the client is ended with all below it.
            start_new_session=True,
            env=environment,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise LauncherError(f"{argv[0]!r} could not be started: {error.strerror or error}.") from error
    lines: deque[str] = deque(maxlen=_KEPT_LINES)
    assert process.stdout is not None
    with process.stdout as output:
        try:
            # A carriage return alone ends a line as well: those of a progress bar have nothing else.
            for line in map(str.rstrip, output):
                if line:
                    lines.append(line)
                    say(line)
            return process.wait(), list(lines)
        finally:
            # `say` has raised: the client would go on, and nobody would be left to read its output or to end it.
            if process.returncode is None:
                # With whatever it has started.
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def reason(lines: Sequence[str]) -> str:
    """Return the engine's own reason: its last error, without the words in front that say that it is one."""
    told = [line.strip() for line in lines if line.strip()]
    errors = [line for line in told if line.lower().startswith(("error", "fatal", "docker: ", "unable to"))]
    # Engines print progress and warnings first; the last error is the one that ended the call.
    last = (errors or told or [""])[-1]
    # The daemon's words twice: they stand alone, or behind `docker:`, which has to be taken off first.
    for prefix in ("Error response from daemon:", "docker:", "Error:", "FATAL:", "Error response from daemon:"):
        last = last.removeprefix(prefix).strip()
    return last.rstrip(".")


def start_failure(
    engine: ContainerEngine, image: str, program: str, exit_code: int, lines: Sequence[str]
) -> str | None:
    """Why no container of `image` came to run `program`; None where the exit code is not the engine's own.

    image: as the user called it. lines: the last of the client's output. Only for a worker that has not reported its
    start: a script may leave with any code.
    """
    # The client's own: it could not start a container, where apptainer ends with 255; the program can't be run; there is no
    # such program.
    if exit_code not in (125 if engine.keeps_containers else 255, 126, 127):
        return None
    told = reason(lines) or f"exit code {exit_code}"
    # The runtime below an engine may report a missing program under another code; then its words tell.
    if exit_code == 127 or (f'"{program}"' in told and _NO_PROGRAM.search(told)):
        return (
            f"custom_docker_image={image!r} has no program {program!r} ({engine.kind}: {told}). "
            "Name the image's interpreter with python=, or choose an image with Python 3.10 or later."
        )
    if exit_code == 126:
        return f"custom_docker_image={image!r}: {engine.kind} can't run its {program!r}: {told}."
    hint = ""
    if "nvidia.com/gpu" in told or "could not select device driver" in told:
        hint = " For GPUs in containers, install NVIDIA's container toolkit (podman: nvidia-ctk cdi generate)."
    return f"custom_docker_image={image!r}: {engine.kind} could not start a container: {told}.{hint}"
