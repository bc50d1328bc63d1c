"""The kinds of compute target: Paceline's own, and those that installed packages bring as entry points.

A package whose module can't be imported must not take the others with it, so what went wrong is kept and told.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.errors import TargetError
from paceline.system import plugins

if TYPE_CHECKING:
    from paceline.targets.options import Option

GROUP = "paceline.targets"
#: kind -> module:class, looked at before any that is installed.
OWN = {
    "local": "paceline.targets.this_machine:ThisMachine",
    "ssh": "paceline.targets.ssh.target:SshTarget",
    "slurm": "paceline.targets.slurm.target:SlurmTarget",
    "ray": "paceline.targets.ray.target:RayTarget",
}


def kind_names() -> list[str]:
    """The names of all kinds, sorted."""
    return plugins.names(GROUP, OWN)


def kind_class(kind: str) -> Any:
    """The class of this kind: has OPTIONS, and makes targets of (name, settings).

    Raises:
        TargetError: there is no such kind, or its module can't be loaded; the message says which.
    """
    place = OWN.get(kind) or plugins.installed(GROUP).get(kind)
    if place is None:
        import difflib  # slow to load, for a mistake alone

        near = difflib.get_close_matches(kind, kind_names(), n=1)
        meant = f" Is {near[0]!r} meant?" if near else ""
        raise TargetError(f"there is no kind {kind!r} of compute target.{meant} There are {', '.join(kind_names())}.")
    return _load(kind, place)


def kind_options(kind: str) -> tuple[Option, ...]:
    """The settings that a target of this kind takes.

    Raises:
        TargetError: as `kind_class`.
    """
    return tuple(getattr(kind_class(kind), "OPTIONS", ()))


def load_errors() -> dict[str, str]:
    """Installed kind -> why it can't be loaded, for each that can't."""
    errors = {}
    for kind, place in plugins.installed(GROUP).items():
        if kind not in OWN:
            try:
                _load(kind, place)
            except TargetError as error:
                errors[kind] = str(error)
    return errors


def make_target(kind: str, name: str, settings: Mapping[str, Any]) -> Any:
    """A target of this kind.

    Raises:
        TargetError: as `kind_class`; or a setting is wrong.
    """
    made = kind_class(kind)
    if not hasattr(made, "OPTIONS"):
        # The plainest kind of plug-in: nothing to set, nothing to tell.
        if settings:
            raise TargetError(f"kind {kind!r} has no settings; found {', '.join(settings)}. Leave them out.")
        return made()
    return made(name, settings)


def _load(kind: str, place: str) -> Any:
    module, _, attribute = place.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # an installed package may raise anything at import
        raise TargetError(
            f"compute targets of kind {kind!r} can't be used: {place} can't be loaded "
            f"({type(error).__name__}: {error}). Mend or remove the package that brings it."
        ) from error
