"""Reader of conda's environment.yml."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from paceline.environments import requirements
from paceline.errors import EnvironmentSpecError

_KNOWN = ("name", "channels", "dependencies", "variables", "prefix")


def read(file_path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read an environment file as the fields of an `Environment`, without name and prefix.

    Raises:
        EnvironmentSpecError: The file is missing, not YAML, or has an unknown entry.
    """
    import yaml

    path = Path(os.path.abspath(os.path.expanduser(file_path)))
    text = requirements.read_text(path, "conda environment file")
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise EnvironmentSpecError(f"{str(path)!r} is not YAML: {' '.join(str(error).split())}.") from error
    if not isinstance(data, dict) or not data.get("dependencies"):
        raise EnvironmentSpecError(f"{str(path)!r} names no packages. Write a list under `dependencies:`.")
    if unknown := sorted(str(key) for key in data if key not in _KNOWN):
        raise EnvironmentSpecError(f"{str(path)!r} has {unknown}; known are {list(_KNOWN)}.")
    packages, pip = _dependencies(_list(data, "dependencies", path), path)
    text, constraints = _pip(pip, path)
    variables = data.get("variables") or {}
    if not isinstance(variables, dict):
        raise EnvironmentSpecError(f"{str(path)!r}: variables is not a mapping of names to values.")
    return {
        "conda_packages": tuple(packages),
        "conda_channels": tuple(_channel(item, path) for item in _list(data, "channels", path)),
        "pip_requirements": text or None,
        "pip_constraints": constraints,
        "environment_variables": {str(name): str(value) for name, value in variables.items()},
    }


def _list(data: dict[str, Any], key: str, path: Path) -> list[Any]:
    values = data.get(key) or []
    if not isinstance(values, list):
        raise EnvironmentSpecError(f"{str(path)!r}: {key} is {values!r}, not a list. Begin each with `- `.")
    return values


def _dependencies(items: list[Any], path: Path) -> tuple[list[str], list[Any]]:
    packages: list[str] = []
    pip: list[Any] = []
    for item in items:
        if isinstance(item, str) and item.strip():
            packages.append(item.strip())
        elif isinstance(item, dict) and set(item) == {"pip"} and isinstance(item["pip"] or [], list):
            pip += item["pip"] or []
        else:
            raise EnvironmentSpecError(
                f"{str(path)!r}: dependencies has {item!r}. Each is a text such as `numpy=2.1`, or `pip:` with a list."
            )
    return packages, pip


def _pip(items: list[Any], path: Path) -> tuple[str, tuple[str, ...]]:
    """Parse the pip list, which may have options and include files, as a requirements file."""
    lines: list[str] = []
    constraints: list[str] = []
    for item in items:
        if not isinstance(item, str) or not item.strip():
            raise EnvironmentSpecError(f"{str(path)!r}: the list under pip has {item!r}, which is not a requirement.")
        for line in requirements.parse(item, f"{path}, pip: {item!r}", path.parent, numbered=False):
            if line.option in ("--requirement", "--constraint"):
                text, more = requirements.read(path.parent / os.path.expanduser(line.value))
                constraints += more
                if line.option == "--requirement":
                    lines += text.splitlines()
                else:
                    constraints += text.splitlines()
            else:
                lines.append(line.text)
    return "".join(f"{line}\n" for line in lines), tuple(constraints)


def _channel(item: Any, path: Path) -> str:
    if not isinstance(item, str) or not item.strip():
        raise EnvironmentSpecError(f"{str(path)!r}: channels has {item!r}, which is not a name or a URL.")
    text = item.strip()
    # A channel's folder is relative to the file.
    if text.startswith(("./", "../")) or text in (".", ".."):
        return os.path.abspath(path.parent / text)
    return os.path.expanduser(text)
