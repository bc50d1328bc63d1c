"""A process's environment: its rank in it, and the variables that may go to other machines."""

from __future__ import annotations

import os
import re

from paceline.compat.horovod.runner.common.util import secret

LOG_LEVEL_STR = ["FATAL", "ERROR", "WARNING", "INFO", "DEBUG", "TRACE"]
#: Variables that stay where they are.
IGNORE_REGEXES = {"BASH_FUNC_.*", "OLDPWD", ".*CUDA_VISIBLE_DEVICES", secret.HOROVOD_SECRET_KEY}
#: The remote shell of Kubeflow's MPI operator.
KUBEFLOW_MPI_EXEC = "/etc/mpi/kubexec.sh"
_RSH_AGENT = "OMPI_MCA_plm_rsh_agent"


def is_exportable(v: str) -> bool:
    """True if the variable of this name may go to another machine."""
    return not any(re.match(pattern, v) for pattern in IGNORE_REGEXES)


def get_env_rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks, as its launcher has set them; (0, 1) without one.

    Raises:
        RuntimeError: one of the two is set and the other is not.
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
    """True if ranks are started by Kubeflow's MPI operator."""
    return os.environ.get(_RSH_AGENT) == KUBEFLOW_MPI_EXEC
