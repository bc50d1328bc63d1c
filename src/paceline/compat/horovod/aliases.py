"""The import hook that makes `import horovod.torch` find `paceline.compat.horovod.torch`."""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder

from paceline.compat.alias_finder import AliasFinder, is_initialising, is_shim
from paceline.errors import UserError

_OURS = "paceline.compat.horovod"
#: Module of Horovod that this package does not have -> what to use instead.
_ABSENT = {
    "mxnet": "MXNet is retired",
    "spark": "use an estimator of Paceline, or horovod itself, on Spark",
    "ray": "use a compute target of Paceline",
    "tensorflow.data": "read with tf.data on each rank, or with torch's DataLoader",
}
#: Package of Horovod -> its submodules whose contents Paceline's package contains itself.
_MERGED = {
    "data": ("data_loader_base",),
    "runner.common.util": ("codec", "env", "secret", "settings", "timeout"),
    "torch.elastic": ("sampler", "state"),
}
_JOBS = (
    "Horovod's own services for starting ranks are not here. A job is started by horovod.run, by horovodrun, or, with "
    "horovod.runner._HorovodArgs, by horovod.runner.launch._run"
)
# Other launchers and similar programs import these modules. Name a replacement in the error, because a plain ModuleNotFoundError
# would look like a broken installation.
_ABSENT |= {
    f"runner.{name}": _JOBS
    for name in (
        *(
            "common.service",
            "common.util.config_parser",
            "common.util.network",
            "driver",
            "elastic",
            "gloo_run",
            "http",
        ),
        *("js_run", "mpi_run", "run_task", "task_fn", "util.cache", "util.lsf", "util.network", "util.remote"),
        "util.streams",
    )
}


def install(*, force: bool = False) -> None:
    """Make `import horovod...` load Paceline's modules, with `force` even if Horovod is installed."""
    if _FINDER in sys.meta_path:
        return
    real = _real_package()
    if real and not force:
        raise UserError(
            f"the real horovod is installed ({real}). Uninstall it (pip uninstall horovod), or put Paceline's before "
            "it with paceline.compat.install('horovod', force=True)."
        )
    _FINDER.install()


_FINDER = AliasFinder(
    "horovod",
    _OURS,
    absent={name: f"{instead} (docs/horovod.md)." for name, instead in _ABSENT.items()},
    # Horovod has no module `aliases`, so `import horovod.aliases` must fail.
    hidden=("aliases",),
    renamed={f"{module}.{name}": module for module, names in _MERGED.items() for name in names},
)
uninstall = _FINDER.uninstall


def _real_package() -> str | None:
    """Return the real Horovod package's path, or None if it is missing."""
    # If `horovod` is loaded, it is the real package unless it belongs to Paceline, or is a shim whose code is running.
    loaded = sys.modules.get("horovod")
    if loaded is not None and not loaded.__name__.startswith(_OURS) and not is_initialising(loaded):
        return str(getattr(loaded, "__file__", "already imported"))
    # Search only in folders: importlib.util.find_spec would also use sys.modules and Paceline's own finder.
    spec = PathFinder.find_spec("horovod")
    # A folder `horovod` without an `__init__.py`, such as a git clone, has no origin. It is not the package.
    if spec is None or spec.origin is None or is_shim(spec.origin):
        return None
    return spec.origin
