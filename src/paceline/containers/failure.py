"""Why a container did not start, told apart from how a script ended.

An engine's client ends with the script's exit code, and with 125, 126 or 127 where it never came to the script; so
does a script that leaves with one of these. Which of the two it was is known by whether the worker reported its start.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from paceline.containers.client import reason
from paceline.containers.engine import ContainerEngine

_NO_PROGRAM = re.compile(r"executable file not found|executable file .* not found|no such file or directory", re.I)


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
