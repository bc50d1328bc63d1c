"""Look for an image, and pull it where it is not there."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from paceline.containers.client import call, reason
from paceline.containers.engine import ContainerEngine
from paceline.errors import LauncherError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+-]*")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(?:b|[kmgt](?:i?b)?)?", re.I)
#: A first part of a name that is a registry, not a folder on Docker's: it has a dot or a port, or is localhost.
_REGISTRY = re.compile(r"(localhost|[^/]*[.:][^/]*)/")


def check_image_name(image: str) -> None:
    """Refuse what can't be the name of an image; needs no engine.

    Raises:
        LauncherError: the name is empty, looks like an option, or has a character that no image's name has.
    """
    if _is_file(image) or _NAME.fullmatch(image):
        return
    raise LauncherError(
        f"custom_docker_image={image!r} is not the name of an image. "
        "Write it as [registry/]name[:tag], such as 'docker.io/pytorch/pytorch:2.4.0-cuda12.4-cudnn9-runtime'."
    )


def check_shm_size(shm_size: str) -> None:
    """Refuse what no engine takes for a size; needs no engine.

    Raises:
        LauncherError: it is not a number with a unit of b, k, m or g, or it is 0.
    """
    found = _SIZE.fullmatch(shm_size)
    if found is None or float(found[1]) == 0:
        raise LauncherError(f"shm_size={shm_size!r} is not a size. Write a number and a unit, such as '512m' or '8g'.")


def check_image(engine: ContainerEngine, image: str, say: Callable[[str], None]) -> str:
    """Return the image's id for the engine to run, so that all workers of all attempts have the same one.

    An image that is not there is pulled; the pull's own lines go to `say`. With apptainer the name as apptainer takes it: it
    fetches and converts the image when it first runs it.

    Raises:
        LauncherError: there is no such image, or it can't be had; with the engine's own reason.
    """
    check_image_name(image)
    if not engine.keeps_containers:
        # A name without a scheme is a file's to apptainer.
        return image if _is_file(image) or "://" in image else f"docker://{image}"
    if found := _id(engine, image):
        return found
    if image.startswith("localhost/"):
        # Podman's name for what was made here: no registry has it.
        raise LauncherError(
            f"custom_docker_image={image!r}: {engine.kind} has no such image on this machine "
            f"({engine.kind} images shows those it has). Build or load it, or name one of a registry."
        )
    name = full_name(image)
    say(f"{engine.kind} pull {name}")
    code, lines = call([engine.path, "pull", name], say=say)
    # Under the name that was pulled: a short one might mean another image, by the engine's own rules for such names.
    if code == 0 and (found := _id(engine, name)):
        return found
    raise LauncherError(
        f"custom_docker_image={image!r} is not on this machine, and {engine.kind} could not pull {name!r}: "
        f"{reason(lines) or f'exit code {code}'}. Check the name and its tag, and log in where the registry "
        f"asks for it ({engine.kind} login)."
    )


def full_name(image: str) -> str:
    """The name with the registry that Docker means by a name without one. Podman would ask, or refuse."""
    if _REGISTRY.match(image):
        return image
    return f"docker.io/{image}" if "/" in image else f"docker.io/library/{image}"


def _id(engine: ContainerEngine, image: str) -> str:
    """The image's id; "" where it is not on this machine."""
    code, lines = call([engine.path, "image", "inspect", "--format", "id={{.Id}}", image])
    # Behind a mark, because `call` mixes standard error in, where engines print warnings.
    found = next((line[3:] for line in lines if line.startswith("id=")), "")
    return found if code == 0 else ""


def _is_file(image: str) -> bool:
    return image.endswith(".sif") and os.path.isfile(image)
