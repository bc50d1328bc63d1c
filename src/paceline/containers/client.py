"""Run a container engine's command-line client, such as podman, and explain its failures."""

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

# Maximum number of output lines to keep for an error message. A pull prints a line for each step of each layer.
_KEPT_LINES = 200

_NO_PROGRAM = re.compile(r"executable file not found|executable file .* not found|no such file or directory", re.I)


def call(
    argv: Sequence[str], *, say: Callable[[str], None] = lambda line: None, environment: Mapping[str, str] | None = None
) -> tuple[int, list[str]]:
    """Run a container engine's client. Return its exit code and last output lines.

    say: Called with each output line. If `say` raises an exception, the client is killed.

    Raises:
        LauncherError: The client can't be started.
    """
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # Start a new process group, so that Ctrl-C does not reach the client. The run ends the client and its children.
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
            # Python also splits lines at the carriage returns of a progress bar. Strip each line's end.
            for line in map(str.rstrip, output):
                if line:
                    lines.append(line)
                    say(line)
            return process.wait(), list(lines)
        finally:
            # `say` has raised an exception, so kill the client: no one would read its output any more.
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def reason(lines: Sequence[str]) -> str:
    """Return the container engine's last error message, without prefixes."""
    texts = [line.strip() for line in lines if line.strip()]
    errors = [line for line in texts if line.lower().startswith(("error", "fatal", "docker: ", "unable to"))]
    # Return the last error line, because this error has ended the call. Progress and warnings precede it.
    last = (errors or texts or [""])[-1]
    # This tuple has "Error response from daemon:" twice, because this prefix may stand before or after "docker:".
    for prefix in ("Error response from daemon:", "docker:", "Error:", "FATAL:", "Error response from daemon:"):
        last = last.removeprefix(prefix).strip()
    return last.rstrip(".")


def start_failure(
    engine: ContainerEngine, image: str, program: str, exit_code: int, lines: Sequence[str]
) -> str | None:
    """Return why no container ran `program`, or None if a container ran it.

    Call this only for a worker that has not reported its start, because a script may end with the engine's exit codes.

    Args:
        engine: The container engine.
        image: The image's name as the user gave it.
        program: The program to run.
        exit_code: The client's exit code.
        lines: The client's last lines of output.
    """
    # The client itself fails with these exit codes: it can't start a container, or the program is not executable or not found.
    if exit_code not in (125 if engine.keeps_containers else 255, 126, 127):
        return None
    message = reason(lines) or f"exit code {exit_code}"
    # An engine may report a missing program with an exit code other than 127, so check its message, too.
    if exit_code == 127 or (f'"{program}"' in message and _NO_PROGRAM.search(message)):
        return (
            f"custom_docker_image={image!r} has no program {program!r} ({engine.kind}: {message}). "
            "Name the image's interpreter with python=, or choose an image with Python 3.10 or later."
        )
    if exit_code == 126:
        return f"custom_docker_image={image!r}: {engine.kind} can't run its {program!r}: {message}."
    hint = ""
    if "nvidia.com/gpu" in message or "could not select device driver" in message:
        hint = " For GPUs in containers, install NVIDIA's container toolkit (podman: nvidia-ctk cdi generate)."
    return f"custom_docker_image={image!r}: {engine.kind} could not start a container: {message}.{hint}"
