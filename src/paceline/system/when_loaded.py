"""Hooks on the import of a module, whoever imports it: call a function after it, or load another module before it."""

from __future__ import annotations

import sys

# Not typing's: a worker loads this before its script.
TYPE_CHECKING = False

if TYPE_CHECKING:
    import importlib.machinery
    from collections.abc import Callable, Sequence
    from types import ModuleType
    from typing import Any


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
