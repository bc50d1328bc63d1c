"""Loading what is needed when it is first asked for: the names of a package, so that to import it loads little; a module of
Python's own that others import and seldom use; a function of a layer above, which the package hands down by its name.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False

if TYPE_CHECKING:
    import importlib.machinery
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import ModuleType
    from typing import Any


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


def when_loaded(name: str, do: Callable[[ModuleType], None]) -> None:
    """Call `do` with the module at the end of its import, which fails where `do` does. The second call for one name does
    nothing; nor does one for a module that has been imported.
    """
    watched = any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path)
    if name not in sys.modules and not watched:
        sys.meta_path.insert(0, _Finder(name, do))


def load_triton_before_tensorflow() -> None:
    """Import Triton as soon as somebody imports TensorFlow, where both are installed.

    Triton's library, loaded after TensorFlow 2.21, ends the process: with SIGSEGV in Triton 3.7, with abort() in 3.9. In the
    other order both work. `torch._dynamo`, and with it `torch.compile`, loads Triton; `torch.utils.tensorboard` loads TensorFlow.
    A second call does nothing, nor does a call after TensorFlow or Triton has been imported.
    """
    watched = any(isinstance(finder, _TritonFirst) for finder in sys.meta_path)
    if not watched and "tensorflow" not in sys.modules and "triton" not in sys.modules:
        sys.meta_path.insert(0, _TritonFirst())


class _TritonFirst:
    """Finds nothing itself: it imports Triton when TensorFlow is looked for."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == "tensorflow":
            sys.meta_path.remove(self)  # type: ignore[arg-type,unused-ignore]
            # Triton may be absent or unusable here; whoever needs it meets the error itself.
            try:
                import triton  # noqa: F401
            except Exception:
                pass


class _Finder:
    """Finds nothing itself: it watches for one module, and puts a loader around the one that is found."""

    def __init__(self, name: str, do: Callable[[ModuleType], None]) -> None:
        self.name, self._do = name, do

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._do)  # type: ignore[assignment,unused-ignore]
        return spec


class _Loader:
    """Loads as the loader within does, and then does what is to be done."""

    def __init__(self, within: Any, do: Callable[[ModuleType], None]) -> None:
        self._within, self._do = within, do

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._within.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps the loader it would have without us, for whoever reads its source.
        if module.__spec__ is not None:
            module.__spec__.loader = self._within
        module.__loader__ = self._within
        self._within.exec_module(module)
        self._do(module)
