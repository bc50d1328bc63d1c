"""Targets and launchers by name: Paceline's own, and those that installed packages bring as entry points."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module


def load(group: str, own: Mapping[str, str], name: str) -> object | None:
    """An instance of the class of this name; None where there is none.

    own: name -> "module:class", looked at first. group: the entry-point group of all others.
    """
    place = own.get(name) or installed(group).get(name)
    if place is None:
        return None
    module, _, attribute = place.partition(":")
    instance: object = getattr(import_module(module), attribute)()
    return instance


def names(group: str, own: Mapping[str, str]) -> list[str]:
    """All names, sorted."""
    return sorted({*own, *installed(group)})


def installed(group: str) -> dict[str, str]:
    """Name -> "module:class", of what installed packages bring."""
    from importlib.metadata import entry_points  # slow to load, and rarely needed

    return {point.name: point.value for point in entry_points(group=group)}


def version_of(distribution: str) -> str | None:
    """The version of what is installed under this name; None where nothing is."""
    from importlib import metadata  # slow to load, and rarely needed

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
