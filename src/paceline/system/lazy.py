"""Loading what is needed when it is first asked for: the names of a package, so that to import it loads little; a module of
Python's own that others import and seldom use; a function of a layer above, which the package hands down by its name.
"""

from __future__ import annotations

import sys

# Not typing's, and nothing of collections': to load them would take longer than all else here.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


def face(package: str, homes: Mapping[str, Iterable[str]]) -> Callable[[str], object]:
    """A package's `__getattr__` (PEP 562). homes: module, by its whole name -> the names that it has for the package.

    What was found is kept in the package, so each name comes by here once.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def __getattr__(name: str) -> object:  # noqa: N807 - it becomes the package's
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from importlib import import_module

        value: object = getattr(import_module(home_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return __getattr__


#: Name of a function -> the module that has it.
_HANDED_DOWN: dict[str, str] = {}


def hand_down(name: str, home: str) -> None:
    """Let layers below ask for the function `name` of the module `home` without knowing the module."""
    _HANDED_DOWN[name] = home


def from_above(name: str) -> object:
    """Return the function that was handed down by this name."""
    from importlib import import_module

    found: object = getattr(import_module(_HANDED_DOWN[name]), name)
    return found


def later(name: str) -> None:
    """Let `import name` load nothing until something of the module is asked for. Does nothing where it is loaded already."""
    from types import ModuleType

    class Later(ModuleType):
        def __getattr__(self, wanted: str) -> object:
            from importlib import import_module

            # Who has imported it keeps this object, and gets each name by it; later imports find the module itself.
            if sys.modules.get(name) is self:
                del sys.modules[name]
            return getattr(import_module(name), wanted)

    sys.modules.setdefault(name, Later(name))
