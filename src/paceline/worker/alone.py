"""Detect at a script's end that a worker has trained alone although the run has other workers.

The state of the loaded libraries shows this. Doubtful cases are not reported: a worker that has loaded another library
for communication, has no optimizer (perhaps it only evaluates), or exits by `os._exit`.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any

from paceline.worker import report

#: Name of the variable that users set if each of their workers trains a separate model.
SEPARATE = "PACELINE_SEPARATE_WORKERS"

#: Further libraries that can connect workers. If a script has loaded one of them, its workers may be connected.
_OTHER_WAYS = (
    *("mpi4py.MPI", "horovod", "torch_xla", "byteps", "bagua", "smdistributed", "oneflow"),
    # Don't list torch.distributed.elastic, because torch's own module for checkpoints also loads parts of it.
    *("ray", "dask.distributed", "distributed", "pyspark", "torch.distributed.launcher", "mindspore", "paddle"),
)
#: If a script has loaded one of these libraries, it trains a model with JAX.
_JAX_TRAINERS = ("optax", "flax", "equinox", "haiku")


def note() -> None:
    """Write the report `alone_<rank>.json` if this worker has trained alone."""
    if int(os.environ.get("PACELINE_WORLD_SIZE", "1")) < 2 or os.environ.get(SEPARATE):
        return
    try:
        library = trained_alone(sys.modules)
    except Exception:  # another version of a library may lack the attributes that this check reads
        return
    if library is not None:
        report.note_alone(library)


def trained_alone(modules: dict[str, ModuleType]) -> str | None:
    """Return the library that trained a model without communication with other workers.

    The result is "lightning", "torch", "tensorflow" or "jax"; None if no library did so, or if the case is doubtful.
    """
    if (
        any(name in modules for name in _OTHER_WAYS)
        or _joined_ours(modules)
        or _joined_torch(modules)
        or _joined_tensorflow(modules)
        or _joined_jax(modules)
    ):
        return None
    if _has_torch_optimizer(modules.get("torch.optim.optimizer")):
        return "lightning" if {"lightning", "pytorch_lightning"} & modules.keys() else "torch"
    if "tensorflow" in modules and _has_keras_optimizer(modules):
        return "tensorflow"
    if "jax" in modules and (any(name in modules for name in _JAX_TRAINERS) or _has_keras_optimizer(modules)):
        return "jax"
    return None


def _joined_ours(modules: dict[str, ModuleType]) -> bool:
    """Return whether Horovod's calls or Paceline's collectives have connected several ranks."""
    return bool(getattr(modules.get("paceline.collectives.world"), "_generations", None))


def _joined_torch(modules: dict[str, ModuleType]) -> bool:
    c10d, rpc = modules.get("torch.distributed.distributed_c10d"), modules.get("torch.distributed.rpc.api")
    if rpc is not None and len(getattr(rpc, "_ALL_WORKER_NAMES", ())) > 1:
        return True
    if c10d is None:
        return False
    if c10d.is_initialized():
        return bool(c10d.get_world_size() > 1)
    # A script that has destroyed its process group leaves traces in torch: the init method, and torch's excepthook.
    hook = getattr(sys.excepthook, "__module__", None)
    return c10d._default_pg_init_method is not None or hook == c10d.__name__


def _joined_tensorflow(modules: dict[str, ModuleType]) -> bool:
    context: Any = getattr(modules.get("tensorflow.python.eager.context"), "_context", None)
    if context is not None and (
        context._server_def or context._collective_ops_server_def or context._collective_leader
    ):
        return True
    # The script may have started a TensorFlow server, which connects the workers, too.
    server = getattr(modules.get("tensorflow.python.training.server_lib"), "Server", None)
    return server is not None and _is_there(server)


def _joined_jax(modules: dict[str, ModuleType]) -> bool:
    state = getattr(modules.get("jax._src.distributed"), "global_state", None)
    return state is not None and (state.client is not None or (state.num_processes or 1) > 1)


def _has_torch_optimizer(module: ModuleType | None) -> bool:
    """Return whether the script has created a torch optimizer."""
    optimizer = getattr(module, "Optimizer", None)
    return optimizer is not None and any(
        getattr(vars(kind).get("step"), "hooked", False) for kind in (optimizer, *_below(optimizer))
    )


def _has_keras_optimizer(modules: dict[str, ModuleType]) -> bool:
    """Return whether any Keras optimizer has made a step, which creates its variables."""
    found = [
        getattr(modules.get(name), kind, None)
        for name, kind in (
            ("keras.src.optimizers.base_optimizer", "BaseOptimizer"),
            ("keras.optimizers.optimizer", "_BaseOptimizer"),
            ("tf_keras.src.optimizers.optimizer", "_BaseOptimizer"),
            ("tf_keras.src.optimizers.legacy.optimizer_v2", "OptimizerV2"),
        )
    ]
    return any(_is_there(kind, "variables") for kind in found if kind)


def _is_there(kind: type, has: str = "__class__") -> bool:
    import gc

    kinds = {kind, *_below(kind)}
    found: list[Any] = [one for one in gc.get_objects() if type(one) in kinds]
    return any(getattr(one, has, None) for one in found)


def _below(kind: type) -> set[type]:
    found, todo = set[type](), [kind]
    while todo:
        below: list[type] = type.__subclasses__(todo.pop())
        for one in below:
            if one not in found:
                found.add(one)
                todo.append(one)
    return found
