"""The rank in a process's environment, and the variables to export to other machines."""

from __future__ import annotations

import os
import re

from paceline.compat.horovod.runner.common.util import secret

LOG_LEVEL_STR = ["FATAL", "ERROR", "WARNING", "INFO", "DEBUG", "TRACE"]
#: Variables that are not exported.
IGNORE_REGEXES = {"BASH_FUNC_.*", "OLDPWD", ".*CUDA_VISIBLE_DEVICES", secret.HOROVOD_SECRET_KEY}
#: The remote shell of Kubeflow's MPI operator.
KUBEFLOW_MPI_EXEC = "/etc/mpi/kubexec.sh"
_RSH_AGENT = "OMPI_MCA_plm_rsh_agent"


def is_exportable(v: str) -> bool:
    """Return whether the variable of this name may go to another machine."""
    return not any(re.match(pattern, v) for pattern in IGNORE_REGEXES)


def get_env_rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks from its launcher; (0, 1) without one.

    Raises:
        RuntimeError: Only one of the two is set.
    """
    # In this order: below horovodrun and mpirun, the first two are there, and HOROVOD_RANK is the rank of this job.
    for prefix in ("HOROVOD", "OMPI_COMM_WORLD", "PMI"):
        names = (f"{prefix}_RANK", f"{prefix}_SIZE")
        values = [os.environ.get(name) for name in names]
        if None not in values:
            return int(values[0] or ""), int(values[1] or "")
        if values != [None, None]:
            missing, there = (names if values[0] is None else names[::-1])[:2]
            raise RuntimeError(
                f"{there} is set and {missing} is not: a launcher sets both. Unset it, or set the other."
            )
    return 0, 1


def is_kubeflow_mpi() -> bool:
    """Return whether Kubeflow's MPI operator starts the ranks."""
    return os.environ.get(_RSH_AGENT) == KUBEFLOW_MPI_EXEC
