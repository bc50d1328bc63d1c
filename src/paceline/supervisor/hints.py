"""What a failure report adds where the framework's own words don't say what to do: pure functions."""

from __future__ import annotations

import dataclasses
import re

from paceline.job import Job
from paceline.runs.failure import FailureReport
from paceline.supervisor.retries import comes_again

_GPU = (
    "Each worker sees its own GPU alone, as cuda:0. For a script that takes the device of its LOCAL_RANK, "
    "say gpu_visibility='node' (--gpu-visibility node)."
)
_KERAS = (
    "Under tf.distribute's strategies for several workers, fit() fails inside TensorFlow with Keras 3. What works: the Keras of "
    "tf_keras (pip_packages=['tf_keras'], environment_variables={'TF_USE_LEGACY_KERAS': '1'}); a training loop of the "
    "script's own with strategy.run; or horovod.keras with distributed_backend='mpi'. See docs/estimators.md."
)

#: What Open MPI says of two processes that no transport connects; its own words are in the log.
_UNREACHABLE = re.compile(r"MPI_ERR_INTERN|MPI_ERR_UNREACH|MPI_ERR_SPAWN|unable to reach each other|unreachable proc")
_SPAWN = (
    "On one machine the ranks have Open MPI's shared memory alone, and listen on no port. A script that starts processes by MPI "
    "(Comm.Spawn, mpi4py.futures) needs its TCP too: environment_variables={'OMPI_MCA_btl': 'self,vader,tcp'} "
    "(--env OMPI_MCA_btl=self,vader,tcp)."
)


def with_hints(report: FailureReport, job: Job, stalled: str | None = None) -> FailureReport:
    """The report, its message with what helps against this failure. stalled: what ranks were waiting for at the end."""
    hints = (_of_gpus(report, job), _of_keras(report), _of_spawning(report, job), _of_source(report, job), stalled)
    found = [text for text in hints if text]
    return dataclasses.replace(report, message=" ".join([report.message, *found])) if found else report


def _of_gpus(report: FailureReport, job: Job) -> str | None:
    """CUDA only says "invalid device ordinal" to a script that takes the device of its local rank, as under torchrun."""
    if job.use_gpu and job.gpu_visibility == "worker" and "invalid device ordinal" in (report.exception or ""):
        return _GPU
    return None


def _of_keras(report: FailureReport) -> str | None:
    """Keras 3 hands TensorFlow a batch that is spread over the replicas as if it were one tensor."""
    if "Attempt to convert a value (PerReplica:" in (report.exception or ""):
        return _KERAS
    return None


def _of_spawning(report: FailureReport, job: Job) -> str | None:
    """Processes that MPI starts share no memory with those that it has started before."""
    if job.distributed_backend != "mpi" or job.compute_target != "local":
        return None
    if "OMPI_MCA_btl" in job.environment_variables:
        return None
    return _SPAWN if _UNREACHABLE.search(report.exception or "") else None


def _of_source(report: FailureReport, job: Job) -> str | None:
    """Why a script that can't be loaded is not started again, though restarts on exceptions were asked for."""
    if job.restart_on_exception and (report.attempt or 1) <= job.max_restarts and comes_again(report):
        return "It would come again with each attempt, so none follows. Mend the source and submit it again."
    return None
