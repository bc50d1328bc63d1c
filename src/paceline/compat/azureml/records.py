"""What the SDK keeps in its service and Paceline in no record of its own: small JSON files below `<workspace>/azureml/`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, TypeVar

from paceline.compat.azureml.exceptions import UserErrorException
from paceline.system.names import name_rule
from paceline.system.registry import Documents, Versions

#: Names of what is kept.
RULE = name_rule("_.-", 255)

T = TypeVar("T")


def add_version(workspace: Any, kind: str, name: str, data: dict[str, Any]) -> int:
    """The version under which this is registered: the latest where nothing has changed, else the next.

    Raises:
        UserErrorException: the name is none.
    """
    if not RULE.fullmatch(name):
        raise UserErrorException(
            f"{name!r} can't be a name: begin with a letter or digit, go on with those, '_', '.', '-'."
        )
    registry = _registry(workspace, kind)
    with registry.locked():
        known = registry.versions(name)
        if known and registry.read(name, known[-1]) == data:
            return known[-1]
        return registry.add(name, lambda version: data)


def version(workspace: Any, kind: str, name: str, number: int | None = None) -> tuple[int, dict[str, Any]] | None:
    """The number and the content of a version, the latest by default; None where there is none."""
    registry = _registry(workspace, kind)
    if not isinstance(name, str) or not RULE.fullmatch(name):
        return None
    known = registry.versions(name)
    if not known or (number is not None and number not in known):
        return None
    found = number or known[-1]
    data = registry.read(name, found)
    return (found, data) if isinstance(data, dict) else None


def names(workspace: Any, kind: str) -> list[str]:
    return _registry(workspace, kind).names()


def documents(workspace: Any, kind: str) -> Documents:
    """What has one content for each name."""
    return Documents(_folder(workspace) / kind, RULE)


def _registry(workspace: Any, kind: str) -> Versions:
    return Versions(_folder(workspace) / kind, RULE)


def _folder(workspace: Any) -> Path:
    return Path(workspace.path) / "azureml"


def late(module: str, name: str) -> Any:
    """A name of a module of this package (`core.model`), loaded now."""
    return getattr(importlib.import_module(f"paceline.compat.azureml.{module}"), name)


class NamedObjects(dict[str, T]):
    """Name -> object; called, it gives itself."""

    def __call__(self) -> NamedObjects[T]:
        return self
