"""Lets `import horovod.torch` find `paceline.compat.horovod.torch`: one module under two names, never two copies."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from paceline.errors import UserError

_OURS = "paceline.compat.horovod"
#: What Horovod has and this package has not, with what to do instead.
_ABSENT = {
    "mxnet": "MXNet is retired",
    "spark": "use an estimator of Paceline, or horovod itself, on Spark",
    "ray": "use a compute target of Paceline",
    "tensorflow.data": "read with tf.data on each rank, or with torch's DataLoader",
}
_JOBS = (
    "Horovod's own services for starting ranks are not here. A job is started by horovod.run, by horovodrun, or, with "
    "horovod.runner._HorovodArgs, by horovod.runner.launch._run"
)
# Launchers that are built on Horovod import these. The error says what to use, where a bare ModuleNotFoundError would look
# like a broken installation.
_ABSENT |= {
    f"runner.{name}": _JOBS
    for name in (
        "common.service",
        "common.util.config_parser",
        "common.util.network",
        "driver",
        "elastic",
        "gloo_run",
        "http",
        "js_run",
        "mpi_run",
        "run_task",
        "task_fn",
        "util.cache",
        "util.lsf",
        "util.network",
        "util.remote",
        "util.streams",
    )
}


def install(*, force: bool = False) -> None:
    """Let every later `import horovod...` of this process find Paceline's modules.

    Raises:
        UserError: the real package is installed, or loaded already, and `force` isn't set.
    """
    # A second finder would change nothing.
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    real = _real_package()
    if real and not force:
        raise UserError(
            f"the real horovod is installed ({real}). Uninstall it (pip uninstall horovod), or put Paceline's before "
            "it with paceline.compat.install('horovod', force=True)."
        )
    # With `force`, modules of the real package may be loaded. The import system would take them from sys.modules, and never
    # ask the finder.
    for name in [name for name in sys.modules if _is_horovod(name)]:
        # While `shim/first/horovod/__init__.py` runs, its own entry is the one that the import system waits for.
        if not _is_initialising(sys.modules[name]):
            del sys.modules[name]
    # Before all others: the finder of sys.path would find the real package first.
    sys.meta_path.insert(0, _Finder())


def uninstall() -> None:
    """Take the names away again; what was imported stays with whoever imported it."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
    for name in [name for name in sys.modules if _is_horovod(name)]:
        del sys.modules[name]


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not _is_horovod(fullname):
            return None
        # Such as ".torch.mpi_ops"; the empty text for the package itself.
        rest = fullname[len("horovod") :]
        first = rest[1:].partition(".")[0]
        # Both are looked up: "tensorflow.data" is absent though "tensorflow" is not, and below "spark" everything is. A
        # module below "runner.http" is never asked for, as the import of its parent fails.
        if (instead := _ABSENT.get(rest[1:]) or _ABSENT.get(first)) is not None:
            raise ModuleNotFoundError(f"No module named {fullname!r}: {instead} (docs/horovod.md).", name=fullname)
        own = importlib.util.find_spec(_OURS + rest)
        # This file is no part of Horovod's interface, so it has no name there.
        if own is None or first == "aliases":
            return None
        return ModuleSpec(
            fullname, _AliasLoader(_OURS + rest), origin=own.origin, is_package=bool(own.submodule_search_locations)
        )


class _AliasLoader(Loader):
    def __init__(self, own: str) -> None:
        self._own = own
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        # Imported under its own name and handed over as it is: two copies would each have handles and process sets of their
        # own.
        module = importlib.import_module(self._own)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has just given the module the alias's spec; it keeps its own.
        module.__spec__ = self._spec


def _real_package() -> str | None:
    """The path of the real horovod, if it can be imported."""
    # A loaded `horovod` is the real one unless it is ours, or the shim, whose code is being run right now.
    loaded = sys.modules.get("horovod")
    if loaded is not None and not loaded.__name__.startswith(_OURS) and not _is_initialising(loaded):
        return str(getattr(loaded, "__file__", "already imported"))
    # The path's finder alone: importlib.util.find_spec would look into sys.modules, and ask our own finder as well.
    spec = PathFinder.find_spec("horovod")
    # A folder `horovod` without an `__init__.py`, such as that of a clone, has no origin and is not the package.
    if spec is None or spec.origin is None or "paceline/compat/shim/" in spec.origin.replace("\\", "/"):
        return None
    return spec.origin


def _is_horovod(name: str) -> bool:
    return name == "horovod" or name.startswith("horovod.")


def _is_initialising(module: ModuleType) -> bool:
    # importlib sets it on the spec for as long as the module's code runs.
    return bool(getattr(module.__spec__, "_initializing", False))
