"""The files of a folder as a table: attributes that are paths below it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class _Folder(Protocol):
    @property
    def path(self) -> Path: ...


class Below:
    """An attribute that is the path of this name below the `path` of the object that has it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, folder: _Folder, kind: type) -> Path:
        return folder.path / self._name
