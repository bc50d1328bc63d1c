"""Find targets and launchers, built-in or from plug-ins, by name."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module


def load(group: str, own: Mapping[str, str], name: str) -> object | None:
    """Return an instance of the class with this name, or None if unknown.

    own: Built-in names -> "module:class". A built-in name takes precedence over a plug-in's name.
    group: The entry-point group of plug-ins.
    """
    place = own.get(name) or installed(group).get(name)
    if place is None:
        return None
    module, _, attribute = place.partition(":")
    instance: object = getattr(import_module(module), attribute)()
    return instance


def names(group: str, own: Mapping[str, str]) -> list[str]:
    """Return the names of the built-in classes `own` and a group's plug-ins, sorted."""
    return sorted({*own, *installed(group)})


def installed(group: str) -> dict[str, str]:
    """Return {name: "module:class"} of the entry points of a group."""
    from importlib.metadata import entry_points  # imported here because it is slow to load, and rarely needed

    return {point.name: point.value for point in entry_points(group=group)}


def version_of(distribution: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    from importlib import metadata  # imported here because it is slow to load, and rarely needed

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
