"""Mappings of a workspace's things, which drivers of 2018 call: `ws.compute_targets()`."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


class NamedObjects(dict[str, T]):
    """Name -> object; called, it gives itself."""

    def __call__(self) -> NamedObjects[T]:
        return self
