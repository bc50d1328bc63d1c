"""Check names of container images, pull images, and inspect an image's Python."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.containers.client import call, reason, start_failure
from paceline.containers.command import INSIDE, Mount, run_argv
from paceline.containers.engine import ContainerEngine
from paceline.errors import LauncherError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+-]*")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(?:b|[kmgt](?:i?b)?)?", re.I)
#: Matches the first part of an image's name if this part has a dot or port, or is localhost. It then names a registry.
_REGISTRY = re.compile(r"(localhost|[^/]*[.:][^/]*)/")

# Lowest version of Python that Paceline supports.
_LEAST = (3, 10)
_MARK = "paceline-probe:"


def check_image_name(image: str) -> None:
    """Raise LauncherError if no image can have this name."""
    if _is_file(image) or _NAME.fullmatch(image):
        return
    raise LauncherError(
        f"custom_docker_image={image!r} is not the name of an image. "
        "Write it as [registry/]name[:tag], such as 'docker.io/pytorch/pytorch:2.4.0-cuda12.4-cudnn9-runtime'."
    )


def check_shm_size(shm_size: str) -> None:
    """Raise LauncherError unless this is a valid size of /dev/shm."""
    match = _SIZE.fullmatch(shm_size)
    if match is None or float(match[1]) == 0:
        raise LauncherError(f"shm_size={shm_size!r} is not a size. Write a number and a unit, such as '512m' or '8g'.")


def check_image(engine: ContainerEngine, image: str, say: Callable[[str], None]) -> str:
    """Return the image's id. Pull a missing image.

    `say` is called with each line of the pull's output. For apptainer, pull nothing and return the image's name or
    file, because apptainer itself fetches an image when it starts the first container.

    Raises:
        LauncherError: The image does not exist or can't be pulled; the message has the engine's reason.
    """
    check_image_name(image)
    if not engine.keeps_containers:
        # Apptainer would treat a name without a scheme as a file.
        return image if _is_file(image) or "://" in image else f"docker://{image}"
    if image_id := _id(engine, image):
        return image_id
    if image.startswith("localhost/"):
        # Podman puts the prefix "localhost/" before the names of locally built images, and can't pull an image with this prefix.
        raise LauncherError(
            f"custom_docker_image={image!r}: {engine.kind} has no such image on this machine "
            f"({engine.kind} images shows those it has). Build or load it, or name one of a registry."
        )
    name = full_name(image)
    say(f"{engine.kind} pull {name}")
    code, lines = call([engine.path, "pull", name], say=say)
    # Use the name that was pulled: the engine might resolve the user's short name to another image.
    if code == 0 and (image_id := _id(engine, name)):
        return image_id
    raise LauncherError(
        f"custom_docker_image={image!r} is not on this machine, and {engine.kind} could not pull {name!r}: "
        f"{reason(lines) or f'exit code {code}'}. Check the name and its tag, and log in where the registry "
        f"asks for it ({engine.kind} login)."
    )


def full_name(image: str) -> str:
    """Add Docker's default registry to an image's name that has no registry."""
    if _REGISTRY.match(image):
        return image
    return f"docker.io/{image}" if "/" in image else f"docker.io/library/{image}"


def _id(engine: ContainerEngine, image: str) -> str:
    code, lines = call([engine.path, "image", "inspect", "--format", "id={{.Id}}", image])
    # The format puts `id=` before the id, because `call` also returns warnings from standard error.
    image_id = next((line[3:] for line in lines if line.startswith("id=")), "")
    return image_id if code == 0 else ""


def _is_file(image: str) -> bool:
    return image.endswith(".sif") and os.path.isfile(image)


@dataclass(frozen=True, kw_only=True)
class ImagePython:
    """The Python and the Open MPI of an image.

    Attributes:
        python: The absolute path of the interpreter in the image.
        mpirun, mpirun_version: Path and version (major, minor) of the image's Open MPI; None without Open MPI.
    """

    python: str
    version: tuple[int, int, int]
    mpirun: str | None = None
    mpirun_version: tuple[int, int] | None = None


def probe(
    engine: ContainerEngine,
    image: str,
    *,
    run_id: str,
    python: str = "python3",
    name: str | None = None,
    mounts: Sequence[Mount] = (),
    say: Callable[[str], None] = lambda line: None,
) -> ImagePython:
    """Start a container to inspect the image's Python and Open MPI.

    Args:
        engine: The container engine.
        image: The image's id or name, as `check_image` returns it.
        run_id: The run's id, which labels the container.
        python: The interpreter: a name on the image's PATH, or a path.
        name: The image's name as the user gave it, for messages. None: `image`.
        mounts: Folders to mount in addition to Paceline's own folder.
        say: Called with each line of output.

    Raises:
        LauncherError: The container can't be started, its Python is missing or older than 3.10, or this machine's
            folders can't be mounted because the engine runs on another machine.
    """
    shown = name or image
    argv = run_argv(
        engine,
        image,
        (python, "-I", "-S", INSIDE, "--probe"),
        run_id=run_id,
        name=f"paceline-{run_id}-probe",
        mounts=[Mount(path=Path(INSIDE).parent.parent, read_only=True), *mounts],
    )
    lines: list[str] = []

    def hear(line: str) -> None:
        # Keep all lines here, because `call` itself returns only the last lines of the output.
        lines.append(line)
        if not line.startswith(_MARK):
            say(line)

    code, _ = call(argv, say=hear)
    data = _answer(lines)
    if code != 0 or data is None:
        raise LauncherError(_why_not(engine, shown, python, code, lines))
    version = (data["version"][0], data["version"][1], data["version"][2])
    if version < _LEAST:
        raise LauncherError(
            f"custom_docker_image={shown!r}: its {python!r} is Python {'.'.join(map(str, version))}, and workers need "
            "3.10 or later. Choose an image with a newer one, or name another interpreter of it with python=."
        )
    # Ignore MPI libraries other than Open MPI, because launchers use Open MPI's options.
    open_mpi = re.search(r"\(Open MPI\) (\d+)\.(\d+)", data["mpirun_version"])
    return ImagePython(
        python=data["executable"] or python,
        version=version,
        mpirun=data["mpirun"] if open_mpi else None,
        mpirun_version=(int(open_mpi[1]), int(open_mpi[2])) if open_mpi else None,
    )


def _answer(lines: Sequence[str]) -> dict[str, Any] | None:
    # Find the answer by its mark, because an entry point, a pull or a shell profile may print other lines.
    found = next((line for line in reversed(lines) if line.startswith(_MARK)), "")
    try:
        data: dict[str, object] = json.loads(found[len(_MARK) :])
    except ValueError:
        return None
    return data


def _why_not(engine: ContainerEngine, image: str, python: str, code: int, lines: Sequence[str]) -> str:
    text = "\n".join(lines)
    # Python prints this message if the container lacks the script INSIDE, which Paceline mounts from this machine.
    if INSIDE in text and "No such file" in text:
        return (
            f"{engine.kind} does not see this machine's folders in its containers ({INSIDE!r} is not there): "
            "does it run on another machine, or in a virtual machine? Share the folders with it, or use another engine."
        )
    message = start_failure(engine, image, python, code, lines)
    if message is not None:
        return message
    last = next((line for line in reversed(lines) if line.strip()), f"exit code {code}")
    return (
        f"custom_docker_image={image!r}: its {python!r} does not run as Python 3.10 or later does: {last.strip()} "
        "Choose another image, or name another interpreter of it with python=."
    )
