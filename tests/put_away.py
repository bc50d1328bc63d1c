"""Modules that are loaded already, and put away until somebody imports them: then they come without the time that it takes.

To whoever imports them, it is as if they were loaded at that moment. What waits for a module in `sys.meta_path`, as Paceline
does in a worker, sees it come.

    put_away(["torch"])     sys.modules has no torch, nor torch.nn
    import torch            both are there again, as they were
"""

from __future__ import annotations

import copy
import importlib
import importlib.machinery
import sys
from collections.abc import Callable, Collection, Sequence
from types import ModuleType


class PutAway:
    """A finder, in front of those that read files, of the modules that were put away."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}
        #: Module -> those that its import has loaded, in their order.
        self._together: dict[str, tuple[str, ...]] = {}

    def load(self, name: str) -> None:
        """Import a module, and remember what came with it."""
        before = set(sys.modules)
        importlib.import_module(name)
        came = tuple(one for one in sys.modules if one not in before)
        self._together.update(dict.fromkeys(came, came))

    def put_away(self, packages: Collection[str]) -> None:
        """Have these packages, and all that is in them, imported once more. Called once."""
        for name in [one for one in sys.modules if one.partition(".")[0] in packages]:
            self._modules[name] = sys.modules.pop(name)
        at = next(at for at, finder in enumerate(sys.meta_path) if finder is importlib.machinery.PathFinder)
        sys.meta_path.insert(at, self)  # type: ignore[arg-type]

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        module = self._modules.get(name)
        if module is None or module.__spec__ is None:
            return None
        # A copy: whoever puts a loader of its own in does not change the module's.
        spec = copy.copy(module.__spec__)
        spec.loader = _Loader(module, lambda: self._bring_with(name))  # type: ignore[assignment]
        return spec

    def _bring_with(self, name: str) -> None:
        """Put those back that came with a module: some are looked for in `sys.modules`, by the name of a class's module."""
        watched = {getattr(finder, "name", None) for finder in sys.meta_path}
        for other in self._together.get(name, ()):
            module = self._modules.get(other)
            if module is None or other in sys.modules:
                continue
            if other in watched:
                self._bring_watched(other, module)
            else:
                sys.modules[other] = module

    def _bring_watched(self, name: str, module: ModuleType) -> None:
        """Import a module as whoever waits for it would see it, and let others have what that one has put into it."""
        within, _, own = name.rpartition(".")
        above = self._modules.get(within)
        shown = vars(above).get(own) if above else None
        was = dict(vars(module))
        importlib.import_module(name)
        if above and shown is not None:
            # By then the package may have had something else under this name, such as a function.
            setattr(above, own, shown)
        for key, value in was.items():
            if vars(module).get(key) is not value and getattr(value, "__module__", None) == name:
                # Others have taken it from there, after that: `from .distributed_c10d import *`.
                for other in self._modules.values():
                    if other is not module and vars(other).get(key) is value:
                        setattr(other, key, vars(module)[key])


class _Loader:
    def __init__(self, module: ModuleType, then: Callable[[], None]) -> None:
        self._module, self._then = module, then
        self._spec, self._loader = module.__spec__, getattr(module, "__loader__", None)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__, module.__loader__ = self._spec, self._loader
        self._then()
