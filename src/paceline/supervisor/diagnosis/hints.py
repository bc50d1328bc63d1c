"""Hints that a failure report adds where the framework's own words don't say what to do: pure functions."""

from __future__ import annotations

import dataclasses
import re

from paceline.job.job import Job
from paceline.runs.failure import FailureReport
from paceline.supervisor.diagnosis.old_scripts import edit_for
from paceline.supervisor.diagnosis.retries import comes_again

_GPU = (
    "Each worker sees its own GPU alone, as cuda:0. For a script that takes the device of its LOCAL_RANK, "
    "say gpu_visibility='node' (--gpu-visibility node)."
)
#: What CUDA says when a kernel was given a wrong value. What the script did then shows in no traceback.
_IN_A_KERNEL = re.compile(r"CUDA error: (device-side assert triggered|an illegal memory access was encountered)")
_ASSERTION = re.compile(r"Assertion `(.+)` failed")
_KERAS = (
    "Under tf.distribute's strategies for several workers, fit() fails inside TensorFlow with Keras 3. What works: the Keras of "
    "tf_keras (pip_packages=['tf_keras'], environment_variables={'TF_USE_LEGACY_KERAS': '1'}); a training loop of the "
    "script's own with strategy.run; or horovod.keras with distributed_backend='mpi'. See docs/estimators.md."
)
#: What Keras 3 says to a script that was written for Keras 2, with words of Keras's own in it.
_OF_KERAS_2 = re.compile(
    r"Trainer\.compile\(\) got an unexpected keyword argument|Argument\(s\) not recognized: \{'(lr|decay)'"
    r"|`keras\.optimizers\.legacy` is not supported|module 'keras[\w.]*' has no attribute"
    r"|cannot import name '\w+' from '(tensorflow\.)?keras|No module named '(tensorflow\.)?keras\."
    r"|object has no attribute '(fit|predict|evaluate)_generator'|passed to BatchNormalization: \{'fused'"
    r"|Could not interpret optimizer identifier: <tensorflow\.python\.training"
)
#: The same without such words; they count where the traceback speaks of Keras.
_PERHAPS_OF_KERAS_2 = re.compile(
    r"'list' object is not callable|object has no attribute '(lr|get_weights|set_weights|ref|get_session)'"
)
_LEGACY_KERAS = (
    "The script is written for Keras 2, and tf.keras is Keras 3. It runs as it is with pip_packages=['tf_keras'] and "
    "environment_variables={'TF_USE_LEGACY_KERAS': '1'}."
)

#: The innermost calls of a process that died while it loaded Triton's library; faulthandler writes the innermost first.
_LOADING_TRITON = re.compile(r'in create_module\n(  File "<frozen [^\n]*\n)*  File "[^"\n]*/triton/')
_TRITON = (
    "It died while it loaded Triton's library, as a process does that has loaded TensorFlow before it. torch.compile and "
    "paceline.parallel load Triton; torch.utils.tensorboard loads TensorFlow. Write `import triton` above `import tensorflow`: "
    "in this order both work."
)
#: What Open MPI says of two processes that no transport connects; its own words are in the log.
_UNREACHABLE = re.compile(r"MPI_ERR_INTERN|MPI_ERR_UNREACH|MPI_ERR_SPAWN|unable to reach each other|unreachable proc")
_SPAWN = (
    "On one machine the ranks have Open MPI's shared memory alone, and listen on no port. A script that starts processes by MPI "
    "(Comm.Spawn, mpi4py.futures) needs its TCP too: environment_variables={'OMPI_MCA_btl': 'self,vader,tcp'} "
    "(--env OMPI_MCA_btl=self,vader,tcp)."
)


def with_hints(
    report: FailureReport, job: Job, stalled: str | None = None, missing: str | None = None
) -> FailureReport:
    """The report, its message with what helps against this failure.

    stalled: what ranks were waiting for at the end. missing: where the file is that the script did not find.
    """
    hints = (
        missing,
        _of_gpus(report, job),
        _of_kernels(report, job),
        _of_triton(report),
        _of_keras(report),
        _of_keras_2(report, job),
        _of_spawning(report, job),
        edit_for(report),
        _of_source(report, job),
        stalled,
    )
    found = [text for text in hints if text]
    if not found:
        return report
    # What a library has said often ends without one.
    message = report.message.rstrip()
    message += "" if message.endswith((".", "!", "?", ":")) else "."
    return dataclasses.replace(report, message=" ".join([message, *found]))


def _of_gpus(report: FailureReport, job: Job) -> str | None:
    """CUDA only says "invalid device ordinal" to a script that takes the device of its local rank, as under torchrun."""
    if job.use_gpu and job.gpu_visibility == "worker" and "invalid device ordinal" in (report.exception or ""):
        return _GPU
    return None


def _of_kernels(report: FailureReport, job: Job) -> str | None:
    """Kernels run behind the script, which hears of their failure at a later line, and not of which value it was."""
    if not _IN_A_KERNEL.search(report.exception or ""):
        return None
    failed = _ASSERTION.search("\n".join(report.last_lines))
    text = "A kernel on the GPU was given a wrong value"
    if failed is not None:
        text += f" ({failed[1]} does not hold)"
    text += ", most often an index out of range: a label beyond the classes, a token beyond the vocabulary."
    if "CUDA_LAUNCH_BLOCKING" not in job.environment_variables:
        text += (
            " The traceback may show a later line; with environment_variables={'CUDA_LAUNCH_BLOCKING': '1'} "
            "(--env CUDA_LAUNCH_BLOCKING=1) it shows the right one."
        )
    return text


def _of_triton(report: FailureReport) -> str | None:
    """Return which import order works where TensorFlow's library was loaded ahead of Triton's."""
    # Triton 3.7 is ended by SIGSEGV, 3.9 by abort().
    is_loading = report.signal in ("SIGSEGV", "SIGABRT") and _LOADING_TRITON.search(report.traceback or "")
    return _TRITON if is_loading else None


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


def _of_keras_2(report: FailureReport, job: Job) -> str | None:
    """Keras 3 took away what most older examples call: `opt.variables()`, `opt.lr`, `experimental_run_tf_function`."""
    said = report.exception or ""
    if job.environment_variables.get("TF_USE_LEGACY_KERAS") == "1":
        return None
    if _OF_KERAS_2.search(said):
        return _LEGACY_KERAS
    told = "\n".join([report.traceback or "", *report.last_lines])
    is_keras = "keras" in told.lower() or ("is not callable" in said and ".variables()" in told)
    return _LEGACY_KERAS if is_keras and _PERHAPS_OF_KERAS_2.search(said) else None


def _of_source(report: FailureReport, job: Job) -> str | None:
    """Tells why a script that can't be loaded is not started again, though restarts on exceptions were asked for."""
    if job.restart_on_exception and (report.attempt or 1) <= job.max_restarts and comes_again(report):
        return "It would come again with each attempt, so none follows. Mend the source and submit it again."
    return None
