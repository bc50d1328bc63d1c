"""Runs an image's Python once, to see what the image has that the workers need."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.containers.client import call
from paceline.containers.command import INSIDE, Mount, run_argv
from paceline.containers.engine import ContainerEngine
from paceline.containers.failure import start_failure
from paceline.errors import LauncherError

# The oldest Python that Paceline itself runs on.
_LEAST = (3, 10)
_MARK = "paceline-probe:"


@dataclass(frozen=True, kw_only=True)
class ImagePython:
    """The interpreter of an image, as seen from inside.

    python: its absolute path. mpirun, mpirun_version: of the Open MPI that the image has, or None.
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
    """Return what the image's `python` is, and which Open MPI is there.

    image: what `check_image` returned; name: what the user called it. python: a name on the image's PATH, or a path.

    Raises:
        LauncherError: no container can be started of the image, it has no such Python, or one before 3.10, or the
            engine does not see this machine's folders.
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
        # All of them, because `call` gives back the last lines alone.
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
    # Other MPIs are passed over: the options that launchers give to mpirun are Open MPI's.
    open_mpi = re.search(r"\(Open MPI\) (\d+)\.(\d+)", data["mpirun_version"])
    return ImagePython(
        python=data["executable"] or python,
        version=version,
        mpirun=data["mpirun"] if open_mpi else None,
        mpirun_version=(int(open_mpi[1]), int(open_mpi[2])) if open_mpi else None,
    )


def _answer(lines: Sequence[str]) -> dict[str, Any] | None:
    # Behind a mark: an entry point, a pull or a shell's profile may print lines of its own.
    found = next((line for line in reversed(lines) if line.startswith(_MARK)), "")
    try:
        data: dict[str, Any] = json.loads(found[len(_MARK) :])
    except ValueError:
        return None
    return data


def _why_not(engine: ContainerEngine, image: str, python: str, code: int, lines: Sequence[str]) -> str:
    text = "\n".join(lines)
    # Python's words for a script that is not there, and this one was to be mounted from here.
    if INSIDE in text and "No such file" in text:
        return (
            f"{engine.kind} does not see this machine's folders in its containers ({INSIDE!r} is not there): "
            "does it run on another machine, or in a virtual machine? Share the folders with it, or use another engine."
        )
    told = start_failure(engine, image, python, code, lines)
    if told is not None:
        return told
    last = next((line for line in reversed(lines) if line.strip()), f"exit code {code}")
    return (
        f"custom_docker_image={image!r}: its {python!r} does not run as Python 3.10 or later does: {last.strip()} "
        "Choose another image, or name another interpreter of it with python=."
    )
