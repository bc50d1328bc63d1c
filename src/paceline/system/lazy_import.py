"""Import modules lazily, and run code when another module is imported."""

from __future__ import annotations

import sys

TYPE_CHECKING = False

if TYPE_CHECKING:
    import importlib.machinery
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import ModuleType
    from typing import Any


def face(package: str, homes: Mapping[str, Iterable[str]]) -> Callable[[str], object]:
    """Return a `__getattr__` for a package (PEP 562) that imports names on first access.

    homes: Full name of a module -> the names that the package exports from this module.
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


#: Name of a function -> name of the higher layer's module that defines the function, as given to `hand_down`.
_HANDED_DOWN: dict[str, str] = {}


def hand_down(name: str, home: str) -> None:
    """Register a function of module `home` for lower layers, which may not import `home`."""
    _HANDED_DOWN[name] = home


def from_above(name: str) -> object:
    """Return a function of a higher layer that was registered by `hand_down`."""
    from importlib import import_module

    found: object = getattr(import_module(_HANDED_DOWN[name]), name)
    return found


def later(name: str) -> None:
    """Defer `import name` until the first use of an attribute of the module."""
    from types import ModuleType

    class Later(ModuleType):
        def __getattr__(self, wanted: str) -> object:
            from importlib import import_module

            # Modules that imported this placeholder keep it, and it forwards each attribute. Later imports get the real module.
            if sys.modules.get(name) is self:
                del sys.modules[name]
            return getattr(import_module(name), wanted)

    sys.modules.setdefault(name, Later(name))


#: Names of the modules that `take_loaded` found loaded and that `when_loaded` has not handled yet.
_taken: set[str] = set()


def take_loaded() -> None:
    """Make `when_loaded` also apply to the modules that are loaded now."""
    _taken.update(sys.modules)


def when_loaded(name: str, do: Callable[[ModuleType], None]) -> None:
    """Call `do` with a module at the end of its import.

    The import fails if `do` raises an error. A second call for the same module does nothing. If the module is loaded
    already, call `do` immediately if `take_loaded` was called after the module's import; otherwise never.
    """
    if name in _taken:
        _taken.discard(name)
        _apply(do, sys.modules[name])
    watched = any(isinstance(finder, _Finder) and finder.name == name for finder in sys.meta_path)
    if name not in sys.modules and not watched:
        sys.meta_path.insert(0, _Finder(name, do))


def _apply(do: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Call `do` with a loaded module, and update other modules' references to changed names."""
    before = dict(vars(module))
    do(module)
    changed = [(name, old) for name, old in before.items() if vars(module).get(name) is not old and name[:2] != "__"]
    for other in list(sys.modules.values()) if changed else ():
        values = getattr(other, "__dict__", {})
        for name, old in changed:
            if values.get(name) is old:
                setattr(other, name, vars(module)[name])


def load_triton_before_tensorflow() -> None:
    """Import Triton just before TensorFlow is imported, if both are installed.

    Loading Triton's library after TensorFlow 2.21 kills the process: SIGSEGV in Triton 3.7, abort() in 3.9. Loading
    Triton first works. `torch.compile` loads Triton, and `torch.utils.tensorboard` loads TensorFlow. This function does
    nothing on a second call, or if Triton or TensorFlow is loaded already.
    """
    watched = any(isinstance(finder, _TritonFirst) for finder in sys.meta_path)
    if not watched and "tensorflow" not in sys.modules and "triton" not in sys.modules:
        sys.meta_path.insert(0, _TritonFirst())


class _TritonFirst:
    """A meta path finder that imports Triton when TensorFlow is imported."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if fullname == "tensorflow":
            sys.meta_path.remove(self)  # type: ignore[arg-type,unused-ignore]
            # Ignore every error: Triton may be missing or broken, and code that needs Triton gets the error from its own import.
            try:
                import triton  # noqa: F401
            except Exception:
                pass


class _Finder:
    """A meta path finder that wraps the loader of one module."""

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
    """A loader that calls a function after the module is executed."""

    def __init__(self, within: Any, do: Callable[[ModuleType], None]) -> None:
        self._within, self._do = within, do

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._within.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        # Tools that read the module's source need the module's original loader.
        if module.__spec__ is not None:
            module.__spec__.loader = self._within
        module.__loader__ = self._within
        self._within.exec_module(module)
        self._do(module)
