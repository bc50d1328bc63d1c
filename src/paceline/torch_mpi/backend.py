"""The backend "mpi" of torch.distributed, which torch's wheels lack, over mpi4py.

    from paceline import torch_mpi
    torch_mpi.install()
    torch.distributed.init_process_group("mpi")

In a run with distributed_backend="mpi" Paceline calls `install_when_loaded` before the script starts, so the first two lines
are not needed. This module imports only the standard library.

For "mpi" torch calls `is_mpi_available()` and `ProcessGroupMPI.create(ranks)`, and uses the `ProcessGroup` that it returns. So
this module replaces only these two functions. It also stores the timeout, because torch does not pass it to them.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from paceline import torch_private
from paceline.collectives.errors import CollectivesError
from paceline.system.lazy_import import when_loaded

if TYPE_CHECKING:
    from paceline.torch_mpi.group import MpiProcessGroup

P = ParamSpec("P")
R = TypeVar("R")

_MODULE = "torch.distributed"
_MARK = "_paceline_mpi"

#: For each thread: `timeout` of the process group that it is creating. torch does not pass it to an MPI backend.
_making = threading.local()


def install() -> None:
    """Register "mpi" as a backend of torch.distributed.

    A second call does nothing. A torch that was built with MPI keeps its own backend.

    Raises:
        CollectivesError: torch is missing, or was built without torch.distributed.
        TorchError: This release of torch creates process groups in an unknown way.
    """
    try:
        import torch.distributed
    except ImportError as error:
        raise CollectivesError(f"the backend 'mpi' needs torch, which {sys.executable} doesn't have.") from error
    if not torch.distributed.is_available():
        raise CollectivesError("this torch was built without torch.distributed; install one from PyPI.")
    _patch(torch.distributed)


def install_when_loaded() -> None:
    """Register "mpi" as soon as the script imports torch.distributed."""
    distributed = sys.modules.get(_MODULE)
    if distributed is not None:
        # If torch was built without distributed support, `torch.distributed` is an empty module.
        if distributed.is_available():
            _patch(distributed)
    else:
        when_loaded(_MODULE, lambda module: _patch(module) if module.is_available() else None)


class ProcessGroupMPI:
    """The factory that torch.distributed calls for the backend "mpi"."""

    @staticmethod
    def create(ranks: Sequence[int]) -> MpiProcessGroup | None:
        """Return the group of these ranks ([]: all ranks), or None on non-member ranks."""
        from paceline.collectives import mpi

        # Check torch's version here and not in `install`: a script that never creates a group over MPI may use any version.
        old = torch_private.too_old('init_process_group("mpi")')
        if old:
            raise CollectivesError(old)
        torch_private.warn_if_untried('init_process_group("mpi")')
        # Check MPI before loading the module `group`, which imports mpi4py: a missing MPI then raises one clear error.
        mpi.world()
        from paceline.torch_mpi import group

        timeout = getattr(_making, "timeout", None)
        # Without a timeout use 30 minutes, torch's own default for backends other than NCCL.
        return group.create(list(ranks), timeout.total_seconds() if timeout is not None else 1800.0)


def _patch(distributed: ModuleType) -> None:
    if getattr(distributed.distributed_c10d, _MARK, False) or torch_private.has_mpi(distributed):
        return

    def around(make: Callable[P, R]) -> Callable[P, R]:
        # Callers pass backend and timeout by position or by name. `bind` finds both arguments in either case.
        parameters = inspect.signature(make)

        def make_group(*args: P.args, **kwargs: P.kwargs) -> R:
            arguments = parameters.bind(*args, **kwargs).arguments
            _refuse_mixture(str(arguments["backend"]))
            before = getattr(_making, "timeout", None)
            _making.timeout = arguments.get("timeout")
            try:
                return make(*args, **kwargs)
            finally:
                _making.timeout = before

        return make_group

    torch_private.offer_mpi(distributed, ProcessGroupMPI, around)
    setattr(distributed.distributed_c10d, _MARK, True)


def _refuse_mixture(backend: str) -> None:
    pairs = [pair.partition(":") for pair in backend.lower().split(",")]
    # A text such as "cpu:gloo,cuda:nccl" names a backend for each kind of device. A plain "mpi" has no colon.
    named = {device: name for device, colon, name in pairs if colon}
    if "mpi" in named.values() and named != {"cpu": "mpi"}:
        raise CollectivesError(
            f"backend={backend!r}: the backend 'mpi' can't be mixed with another one in one process group, and is for "
            "tensors on the CPU. Make the default group with 'nccl' and another one for the CPU with "
            "torch.distributed.new_group(backend='mpi')."
        )
