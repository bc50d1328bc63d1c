"""An import hook by which `import horovod.torch` returns the module `paceline.compat.horovod.torch`, not a copy of it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


# Don't derive this finder and the loader from importlib.abc's classes, because importing importlib.abc takes too long.
class AliasFinder:
    """A module finder that imports `<name>.x` from the package `<own>`.

    Args:
        name: The aliased package, such as "horovod".
        own: Paceline's package with its modules, such as "paceline.compat.horovod".
        absent: Maps each module that Paceline lacks, such as "spark" for `horovod.spark`, to the reason and an
            alternative. The submodules of such a module are absent too.
        hidden: Modules directly below `own` that `name` must not have, such as "aliases".
        renamed: Maps a module of `name` to the module's name in `own`.
        beside: Function that returns the spec of a module that another distribution adds to package `name`, else None.
    """

    def __init__(
        self,
        name: str,
        own: str,
        *,
        absent: Mapping[str, str],
        hidden: Sequence[str] = (),
        renamed: Mapping[str, str] | None = None,
        beside: Callable[[str], ModuleSpec | None] = lambda name: None,
    ) -> None:
        self.name, self._own, self._absent, self._hidden, self._beside = name, own, absent, hidden, beside
        self._renamed = renamed or {}

    def covers(self, module: str) -> bool:
        """Return whether a module is the aliased package or one of its submodules."""
        return module == self.name or module.startswith(f"{self.name}.")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self.covers(fullname):
            return None
        # Path of the submodule, such as ".torch.mpi_ops". It is "" for the package.
        rest = fullname[len(self.name) :]
        if (why := self.absent(rest[1:])) is not None:
            raise ModuleNotFoundError(f"No module named {fullname!r}: {why}", name=fullname)
        if (other := self._renamed.get(rest[1:])) is not None:
            rest = f".{other}"
        own = None if fullname[len(self.name) + 1 :].partition(".")[0] in self._hidden else spec_of(self._own + rest)
        if own is None:
            return self._beside(fullname)
        loader: Any = _AliasLoader(self._own + rest)
        return ModuleSpec(fullname, loader, origin=own.origin, is_package=bool(own.submodule_search_locations))

    def absent(self, rest: str) -> str | None:
        """Return why Paceline lacks a submodule, with its replacement; None for other submodules."""
        return next((why for name, why in self._absent.items() if f"{rest}.".startswith(f"{name}.")), None)

    def install(self) -> None:
        """Make imports ask this finder first, before they find the real package."""
        # Keep a package in sys.modules while its code runs, because the import system expects it there.
        self._forget(but_initialising=True)
        sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        """Remove the aliases. Programs can still use modules that they have imported."""
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        self._forget()

    def _forget(self, *, but_initialising: bool = False) -> None:
        """Remove the aliased modules from `sys.modules`, so that imports ask the finder.

        but_initialising: Keep modules whose import is still in progress, because the import system needs them.
        """
        for name in [name for name in sys.modules if self.covers(name)]:
            if not (but_initialising and is_initialising(sys.modules[name])):
                del sys.modules[name]


def spec_of(module: str) -> ModuleSpec | None:
    """Return a module's import spec, or None if it does not exist."""
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        return None


def is_initialising(module: ModuleType) -> bool:
    # While a module's code runs, importlib sets the attribute `_initializing` of the module's spec.
    return bool(getattr(module.__spec__, "_initializing", False))


def is_shim(path: str) -> bool:
    """Return whether a path is in `compat/shim`, whose folders make `import horovod` work."""
    return "paceline/compat/shim/" in path.replace("\\", "/")


class _AliasLoader:
    def __init__(self, own: str) -> None:
        self._own = own
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        # Return the module that Python imported under its real name. A copy would have separate state, such as handles.
        module = importlib.import_module(self._own)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has replaced the module's spec by the spec of the alias. Restore the module's own spec.
        module.__spec__ = self._spec
