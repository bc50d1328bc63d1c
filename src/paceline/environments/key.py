"""Compute the cache keys of environments, and find their local packages, folders and channels."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from paceline.environments.base import Base
from paceline.environments.requirements import RequirementLine, constraints_of, lines_of, logical_lines
from paceline.errors import EnvironmentSpecError
from paceline.job.environment import EnvironmentSpec
from paceline.job.local_paths import LocalPath, is_editable, local_path

#: Version of the build procedure. Increase it when the procedure changes, because it is a part of each key.
_MAKING = 1
_LENGTH = 20
_PASSED_OVER = frozenset(
    {".git", ".hg", "__pycache__", ".venv", "venv", ".tox", ".mypy_cache", ".paceline", "node_modules"}
)
#: Files that an editable install reads once. The package's code is not among them: each import reads it.
_METADATA = ("pyproject.toml", "setup.cfg", "setup.py")

#: A function that takes a local path and returns the path to use instead.
Where = Callable[[Path], Path]
_FIND_LINKS = re.compile(r"(?:-f|--find-links)(?:\s+|=)(/.*)")


def key(environment: EnvironmentSpec, base: Base) -> str:
    """Return the cache key of an environment's content, 20 hex digits.

    The environment's name, version, variables and image are not part of the key.

    Raises:
        EnvironmentSpecError: pip can't parse a requirement, or a local path can't be read.
    """
    lines = lines_of(environment)
    content: dict[str, object] = {
        "making": _MAKING,
        "base": base.identity(),
        # A layered environment has only packages that the base lacks, so its content depends on the base's packages.
        "installed": base.installed() if environment.layered else None,
        "python_version": environment.python_version,
        # Keep the order of options, because a later option may override an earlier one.
        "options": [line.text for line in lines if line.option is not None],
        "requirements": sorted({_canonical(line) for line in lines if line.option is None}),
        "constraints": sorted({_canonical(line) for line in constraints_of(environment)}),
        "conda_packages": sorted({" ".join(spec.split()) for spec in environment.conda_packages}),
        "conda_channels": environment.conda_channels if environment.uses_conda else (),
        "locked_pip": sorted(environment.locked_pip),
        "locked_conda": sorted(environment.locked_conda),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:_LENGTH]


def _canonical(line: RequirementLine) -> str:
    if line.path is not None:
        return f"{line.path} {_content(line.path)}"
    if line.requirement is None:
        return line.text
    from packaging.utils import canonicalize_name

    text = str(line.requirement)
    return f"{canonicalize_name(line.requirement.name)}{text[len(line.requirement.name) :]} {line.tail}".strip()


def _content(local: LocalPath) -> str:
    digest = hashlib.sha256()
    try:
        if local.path.is_dir():
            if local.is_editable:
                for name in _METADATA:
                    if (local.path / name).is_file():
                        _add(digest, local.path / name, name)
            else:
                for name, path in source_files(local.path):
                    _add(digest, path, name)
        else:
            _add(digest, local.path, "")
    except OSError as error:
        raise EnvironmentSpecError(
            f"{str(local.path)!r}, which is to be installed, can't be read: {error.strerror}: {error.filename!r}."
        ) from error
    return digest.hexdigest()


def source_files(top: Path) -> Iterator[tuple[str, Path]]:
    """Yield (relative name, file) of a local package's sources, in order.

    Raises:
        OSError: A folder can't be read.
    """
    # Raise for an unreadable folder: `os.walk` would skip it, and different trees would get the same key.
    for folder, folders, files in os.walk(top, onerror=_raise):
        # Skip folders that an earlier install has created: *.egg-info, and build/ at the top. Elsewhere build/ is a package.
        skipped = {*_PASSED_OVER, "build"} if folder == os.fspath(top) else _PASSED_OVER
        folders[:] = sorted(name for name in folders if name not in skipped and not name.endswith(".egg-info"))
        for name in sorted(files):
            if not name.endswith(".pyc"):
                path = Path(folder, name)
                yield os.path.relpath(path, top), path


def _raise(error: OSError) -> None:
    raise error


def _add(digest: hashlib._Hash, path: Path, name: str) -> None:
    digest.update(os.fsencode(name) + b"\0")
    # For a broken link, use the stat of the link itself.
    status = os.stat(path) if path.exists() else os.lstat(path)
    # Skip pipes and devices: reading a pipe would block, and a device has no end.
    if not stat.S_ISREG(status.st_mode):
        digest.update(b"special\0")
        return
    digest.update(f"{status.st_size}\0".encode())
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            digest.update(data)


def paths_of(environment: EnvironmentSpec) -> list[Path]:
    """Return all local paths of an environment, even missing paths."""
    paths: list[Path] = []

    def note(path: Path) -> Path:
        paths.append(path)
        return path

    # `moved` calls `note` for every path. The environment that `moved` returns is not needed here.
    moved(environment, note)
    return list(dict.fromkeys(paths))


def moved(environment: EnvironmentSpec, where: Where) -> EnvironmentSpec:
    """Return the environment with each local path replaced by `where(path)`."""
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
    if links := _FIND_LINKS.fullmatch(line):
        return f"--find-links {where(Path(links[1]))}"
    path = None if line.startswith("-") and not is_editable(line) else local_path(line)
    # Both pip and uv can read the line with the replaced path. A line without a local path stays unchanged.
    return line if path is None else replace(path, path=where(path.path)).line()


def _moved_channel(channel: str, where: Where) -> str:
    from paceline.environments.conda import channel_folder

    folder = channel_folder(channel)
    return channel if folder is None else f"file://{quote(str(where(folder)))}"
