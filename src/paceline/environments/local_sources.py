"""The folders and archives of a machine that an environment is made from; and the same environment with others.

Those are packages by path, folders of `--find-links`, and conda channels of `file://`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from paceline.environments.requirements import logical_lines
from paceline.job.environment import EnvironmentSpec
from paceline.job.local_paths import is_editable, local_path

#: One place after another, and what stands for it.
Where = Callable[[Path], Path]
_FIND_LINKS = re.compile(r"(?:-f|--find-links)(?:\s+|=)(/.*)")


def paths_of(environment: EnvironmentSpec) -> list[Path]:
    """All of them, in the order in which they are named; they need not be there."""
    found: list[Path] = []

    def note(path: Path) -> Path:
        found.append(path)
        return path

    # It asks `note` for every place; the environment that it makes is not needed.
    moved(environment, note)
    return list(dict.fromkeys(found))


def moved(environment: EnvironmentSpec, where: Where) -> EnvironmentSpec:
    """The environment made from what `where` names in their places."""
    text = environment.pip_requirements
    return replace(
        environment,
        pip_packages=tuple(_moved(line, where) for line in environment.pip_packages),
        pip_requirements=text and "".join(f"{_moved(line, where)}\n" for _, line in logical_lines(text)),
        pip_constraints=tuple(_moved(line, where) for line in environment.pip_constraints),
        locked_pip=tuple(_moved(line, where) for line in environment.locked_pip),
        conda_channels=tuple(_moved_channel(channel, where) for channel in environment.conda_channels),
    )


def _moved(line: str, where: Where) -> str:
    if found := _FIND_LINKS.fullmatch(line):
        return f"--find-links {where(Path(found[1]))}"
    path = None if line.startswith("-") and not is_editable(line) else local_path(line)
    # As a line that pip and uv read alike; what names no path stays as it was written.
    return line if path is None else replace(path, path=where(path.path)).line()


def _moved_channel(channel: str, where: Where) -> str:
    from paceline.environments.conda import channel_folder

    folder = channel_folder(channel)
    return channel if folder is None else f"file://{quote(str(where(folder)))}"
