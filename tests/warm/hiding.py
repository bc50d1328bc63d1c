"""Modules that are loaded already, and hidden until somebody imports them: then they come without the time that it takes.

To whoever imports them, it is as if they were loaded at that moment, with all that they load. Whoever watches for a module
(`paceline.system.lazy_import`) hears of it, and what is changed in it then is changed where others have taken it from there.

    hiding.load("torch"); hiding.hide()     sys.modules has no torch, nor torch.nn
    import torch                            both are there again, as they were
"""

from __future__ import annotations

import builtins
import copy
import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class Hiding:
    """A finder of the hidden modules."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}
        #: Module -> modules that were loaded by the same import, in their order.
        self._group: dict[str, list[str]] = {}
        self._asked: set[str] = set()
        #: Module -> (importing module, names that it has imported from this module, or `*`).
        self._takers: dict[str, list[tuple[str, tuple[str, ...]]]] = {}
        # This reference keeps the object alive until it has hidden a module. Freeing it takes 0.04 CPU seconds at the
        # end of each process.
        self._itself: Hiding | None = self

    def load(self, name: str) -> None:
        """Import a module if it is installed, and remember the modules that come with it."""
        if find_spec(name.partition(".")[0]) is None:
            return
        before, imports = set(sys.modules), builtins.__import__

        def noting(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
            module = imports(name, globals, locals, fromlist, level)
            # A module that is still being imported has no names yet that another module could have changed.
            if fromlist and globals and not getattr(getattr(module, "__spec__", None), "_initializing", False):
                taker = globals.get("__name__", "")
                if taker in sys.modules and getattr(module, "__name__", None):
                    self._takers.setdefault(module.__name__, []).append((taker, tuple(fromlist)))
            return module

        builtins.__import__ = noting
        try:
            importlib.import_module(name)
        finally:
            builtins.__import__ = imports
        came = [one for one in sys.modules if one not in before and _top(one) not in sys.stdlib_module_names]
        self._group.update(dict.fromkeys(came, came))
        self._asked.add(name)

    def hide(self) -> None:
        """Have all that was loaded imported once more. Called once."""
        self._itself = None
        self._modules = {name: sys.modules.pop(name) for name in self._group if name in sys.modules}
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        module = self._modules.get(name)
        if module is None:
            return None
        own = getattr(module, "__spec__", None)
        # Copy the spec, because an importer that replaces the loader must not change the module's own spec.
        spec = copy.copy(own) if own else ModuleSpec(name, None, is_package=hasattr(module, "__path__"))
        spec.loader = _Loader(self, name, module)  # type: ignore[assignment]
        return spec

    def show(self, name: str) -> None:
        """Show the modules that came with this module; watchers of one of them are notified."""
        group = [one for one in self._group[name] if one in self._modules]
        with_it = group if name in self._asked else [one for one in group if _top(one) == _top(name)]
        watched = {getattr(finder, "name", None) for finder in sys.meta_path}
        before = {one: dict(vars(self._modules[one])) for one in with_it if one in watched}
        for one in with_it:
            if one in sys.modules:
                continue
            if one not in watched:
                sys.modules[one] = self._modules[one]
                continue
            within, _, own = one.rpartition(".")
            above = self._modules.get(within)
            kept = vars(above).get(own) if above else None
            importlib.import_module(one)
            if above and kept is not None:
                # Meanwhile the package may have set something else under this name, such as a function.
                setattr(above, own, kept)
            for other, values in before.items():
                self._pass_on(self._modules[other], values)
                before[other] = dict(vars(self._modules[other]))

    def _pass_on(self, module: ModuleType, before: dict[str, Any]) -> None:
        """Give what has changed in a module to those that have taken it from there, and to those that took it from them."""
        changed = {
            name: (before[name], value)
            for name, value in vars(module).items()
            if name in before and before[name] is not value and name[:2] != "__"
        }
        for by, names in self._takers.get(module.__name__, ()) if changed else ():
            taker = self._modules.get(by) or sys.modules.get(by)
            if taker is None or taker is module:
                continue
            taken = {id(old): new for name, (old, new) in changed.items() if name in names or "*" in names}
            values = dict(vars(taker))
            for name, value in values.items():
                if id(value) in taken:
                    setattr(taker, name, taken[id(value)])
            self._pass_on(taker, values)


class _Loader:
    def __init__(self, hiding: Hiding, name: str, module: ModuleType) -> None:
        self._hiding, self._name, self._module = hiding, name, module
        self._own = {key: getattr(module, key, None) for key in ("__spec__", "__loader__")}

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        # Restore the attributes that the import system, or a watcher, has replaced.
        vars(module).update(self._own)
        self._hiding.show(self._name)


def _top(name: str) -> str:
    return name.partition(".")[0]
