"""The backend of `torch.distributed.init_process_group("mpi")`, over mpi4py.

`install` registers the backend immediately; `install_when_loaded` registers it when the script loads torch.distributed.
Importing this package loads neither torch nor MPI.
"""

from __future__ import annotations

from paceline.system.lazy_import import face

TYPE_CHECKING = False

if TYPE_CHECKING:
    from paceline.torch_mpi.backend import install, install_when_loaded

__all__ = ["install", "install_when_loaded"]

__getattr__ = face(__name__, {"paceline.torch_mpi.backend": __all__})
