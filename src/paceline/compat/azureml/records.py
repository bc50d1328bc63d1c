"""JSON records below `<workspace>/azureml/`, for data that only the SDK stores."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from paceline.compat.azureml.exceptions import UserErrorException
from paceline.system.registry import Documents, Versions

if TYPE_CHECKING:
    from paceline import Workspace

#: A record's name must match this pattern.
RULE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")

T = TypeVar("T")
#: A record in the form of parsed JSON.
Document: TypeAlias = "dict[str, Any]"


def add_version(workspace: Workspace, kind: str, name: str, data: Mapping[str, object]) -> int:
    """Register a record and return its version. An unchanged record keeps its version."""
    if not RULE.fullmatch(name):
        raise UserErrorException(
            f"{name!r} is not a valid name: begin with a letter or digit; then letters, digits, '_', '.' and '-'."
        )
    registry = _registry(workspace, kind)
    with registry.locked():
        known = registry.versions(name)
        if known and registry.read(name, known[-1]) == data:
            return known[-1]
        return registry.add(name, lambda version: data)


def version(workspace: Workspace, kind: str, name: str, number: int | None = None) -> tuple[int, Document] | None:
    """Return (number, content) of a record's version, by default the latest; None if missing."""
    registry = _registry(workspace, kind)
    if not isinstance(name, str) or not RULE.fullmatch(name):
        return None
    known = registry.versions(name)
    if not known or (number is not None and number not in known):
        return None
    found = number or known[-1]
    data = registry.read(name, found)
    return (found, data) if isinstance(data, dict) else None


def names(workspace: Workspace, kind: str) -> list[str]:
    return _registry(workspace, kind).names()


def documents(workspace: Workspace, kind: str) -> Documents:
    """Return the records of a kind that has no versions, by name."""
    return Documents(_folder(workspace) / kind, RULE)


def update(workspace: Workspace, kind: str, name: str, values: Mapping[str, object]) -> None:
    """Set `values` in the record called `name`. The record keeps all other values."""
    kept = documents(workspace, kind)
    with _registry(workspace, kind).locked():
        kept.put(name, {**(kept.read(name) or {}), **values})


def _registry(workspace: Workspace, kind: str) -> Versions:
    return Versions(_folder(workspace) / kind, RULE)


def _folder(workspace: Workspace) -> Path:
    return Path(workspace.path) / "azureml"


def late(module: str, name: str) -> Any:
    """Import and return the object `name` of this package's `module`, such as `core.model`."""
    return getattr(importlib.import_module(f"paceline.compat.azureml.{module}"), name)


class NamedObjects(dict[str, T]):
    """A dict of objects by name. Calling it returns the dict itself, for old programs."""

    def __call__(self) -> NamedObjects[T]:
        return self
