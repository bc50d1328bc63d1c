"""Add hints to failure reports: what to do about a framework's error, and where missing files are."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Sequence

from paceline.job.job import Job
from paceline.runs.failure import FailureReport
from paceline.runs.work_dir import Place
from paceline.supervisor.diagnosis.retries import comes_again
from paceline.system.linked import NotCopied, why_kept

_GPU = (
    "Each worker sees its own GPU alone, as cuda:0. For a script that takes the device of its LOCAL_RANK, "
    "say gpu_visibility='node' (--gpu-visibility node)."
)
#: CUDA's message if a kernel gets a wrong value. The traceback does not show the script's line that caused it.
_IN_A_KERNEL = re.compile(r"CUDA error: (device-side assert triggered|an illegal memory access was encountered)")
_ASSERTION = re.compile(r"Assertion `(.+)` failed")
_KERAS = (
    "Under tf.distribute's strategies for several workers, fit() fails inside TensorFlow with Keras 3. What works: the Keras of "
    "tf_keras (pip_packages=['tf_keras'], environment_variables={'TF_USE_LEGACY_KERAS': '1'}); a training loop of the "
    "script's own with strategy.run; or horovod.keras with distributed_backend='mpi'. See docs/estimators.md."
)
#: Errors of a script for Keras 2 under Keras 3, whose messages mention Keras or its arguments.
_OF_KERAS_2 = re.compile(
    r"Trainer\.compile\(\) got an unexpected keyword argument|Argument\(s\) not recognized: \{'(lr|decay)'"
    r"|`keras\.optimizers\.legacy` is not supported|module 'keras[\w.]*' has no attribute"
    r"|cannot import name '\w+' from '(tensorflow\.)?keras|No module named '(tensorflow\.)?keras\."
    r"|object has no attribute '(fit|predict|evaluate)_generator'|passed to BatchNormalization: \{'fused'"
    r"|Could not interpret optimizer identifier: <tensorflow\.python\.training"
)
#: Errors of a script for Keras 2 whose messages do not mention Keras; the traceback has to mention it.
_PERHAPS_OF_KERAS_2 = re.compile(
    r"'list' object is not callable|object has no attribute '(lr|get_weights|set_weights|ref|get_session)'"
)
_LEGACY_KERAS = (
    "The script is written for Keras 2, and tf.keras is Keras 3. It runs as it is with pip_packages=['tf_keras'] and "
    "environment_variables={'TF_USE_LEGACY_KERAS': '1'}."
)

#: Innermost calls in the stack of a process that died while it loaded Triton's library.
_LOADING_TRITON = re.compile(r'in create_module\n(  File "<frozen [^\n]*\n)*  File "[^"\n]*/triton/')
_TRITON = (
    "It died while it loaded Triton's library, as a process does that has loaded TensorFlow before it. torch.compile and "
    "paceline.parallel load Triton; torch.utils.tensorboard loads TensorFlow. Write `import triton` above `import tensorflow`: "
    "in this order both work."
)
#: Open MPI's error messages when two processes have no way to send messages to each other.
_UNREACHABLE = re.compile(r"MPI_ERR_INTERN|MPI_ERR_UNREACH|MPI_ERR_SPAWN|unable to reach each other|unreachable proc")
_SPAWN = (
    "On one machine the ranks have Open MPI's shared memory alone, and listen on no port. A script that starts processes by MPI "
    "(Comm.Spawn, mpi4py.futures) needs its TCP too: environment_variables={'OMPI_MCA_btl': 'self,vader,tcp'} "
    "(--env OMPI_MCA_btl=self,vader,tcp)."
)

#: Pattern of an exception -> the edit that fixes it. The first match counts.
_EDITS = (
    (
        r"module 'numpy' has no attribute '(float|int|bool|object|str|complex|long|unicode)'",
        "np.{0} was removed in NumPy 1.24: write {1}.",
    ),
    (r"module 'numpy' has no attribute '(asscalar)'", "np.asscalar(x) was removed from NumPy: write x.item()."),
    (
        r"No module named 'sklearn\.externals",
        "sklearn.externals was removed in scikit-learn 0.23: write `import joblib`.",
    ),
    (
        r"cannot import name '(joblib)' from 'sklearn\.externals'",
        "It was removed in scikit-learn 0.23: write `import joblib`.",
    ),
    (r"invalid index of a 0-dim tensor", "Since PyTorch 0.5 a loss is a number: write loss.item() for loss.data[0]."),
    (
        r"Torch not compiled with CUDA enabled|Found no NVIDIA driver",
        "This PyTorch, or this machine, has no CUDA: write device = 'cuda' if torch.cuda.is_available() else 'cpu', and "
        ".to(device) for .cuda().",
    ),
    (
        r"Distributed package doesn't have NCCL|ProcessGroupNCCL is only supported with GPUs|NCCL.*no GPUs found",
        "NCCL works on GPUs alone: write init_process_group('gloo') where there is none.",
    ),
    (
        r"Weights only load failed|WeightsUnpickler error",
        "Since PyTorch 2.6 torch.load reads tensors alone: save model.state_dict(), or, for a file that you trust, write "
        "torch.load(path, weights_only=False).",
    ),
    (
        r"No module named 'tensorflow\.contrib'|'tensorflow' has no attribute 'contrib'",
        "tf.contrib ended with TensorFlow 1: its parts are in tf.keras, tensorflow_addons and tf_slim.",
    ),
    (
        r"module 'tensorflow' has no attribute '(Session|placeholder|global_variables_initializer|app|flags|logging|train|"
        r"ConfigProto|get_variable|layers|losses|summary|gfile|reset_default_graph)'|tf\.placeholder\(\) is not compatible",
        "The script is written for TensorFlow 1: write `import tensorflow.compat.v1 as tf; tf.disable_v2_behavior()`.",
    ),
    (
        r"No module named 'tensorflow\.examples'",
        "tensorflow.examples ended with TensorFlow 1: write tf.keras.datasets.mnist.load_data().",
    ),
    (
        r"No module named 'horovod\.spark'|horovod\.spark",
        "horovod.spark is not here: submit the training as a run on ranks.",
    ),
    (
        r"The filename must end in `\.weights\.h5`",
        "Keras 3 wants save_weights('x.weights.h5') for save_weights('x.h5').",
    ),
    (r"No module named 'azureml\.(train\.automl|automl|interpret|contrib|dataprep)", "See docs/from-azureml.md."),
    (
        r"'DataFrame' object has no attribute '(append|ix)'",
        "DataFrame.{0} was removed from pandas: write pd.concat([a, b]), or .loc.",
    ),
    (r"No module named 'imp'", "imp was removed in Python 3.12: write importlib."),
    (
        r"cannot import name '(Mapping|Iterable|Sequence|Callable|MutableMapping)' from 'collections'",
        "It moved: write `from collections.abc import {0}`.",
    ),
)
_COMPILED = tuple((re.compile(pattern), edit) for pattern, edit in _EDITS)
#: A removed alias in NumPy -> the Python type, if the names differ.
_PLAIN = {"long": "int", "unicode": "str"}

_FILE = re.compile(r"FileNotFoundError: .*'([^']+)'")
#: Module -> its package on PyPI, if the names differ.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dotenv": "python-dotenv",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")


def with_hints(
    report: FailureReport, job: Job, stalled: str | None = None, missing: str | None = None
) -> FailureReport:
    """Return the failure report, its message extended by hints on what to do.

    stalled: A sentence about the collectives that ranks waited for at the end, or None.
    missing: A sentence about the place of a file that the script did not find, or None.
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
    # End the message with a full stop: messages of libraries often lack one.
    message = report.message.rstrip()
    message += "" if message.endswith((".", "!", "?", ":")) else "."
    return dataclasses.replace(report, message=" ".join([message, *found]))


def _of_gpus(report: FailureReport, job: Job) -> str | None:
    if job.use_gpu and job.gpu_visibility == "worker" and "invalid device ordinal" in (report.exception or ""):
        return _GPU
    return None


def _of_kernels(report: FailureReport, job: Job) -> str | None:
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
    # The signal is SIGSEGV with Triton 3.7, and SIGABRT (from abort()) with 3.9.
    is_loading = report.signal in ("SIGSEGV", "SIGABRT") and _LOADING_TRITON.search(report.traceback or "")
    return _TRITON if is_loading else None


def _of_keras(report: FailureReport) -> str | None:
    if "Attempt to convert a value (PerReplica:" in (report.exception or ""):
        return _KERAS
    return None


def _of_spawning(report: FailureReport, job: Job) -> str | None:
    if job.distributed_backend != "mpi" or job.compute_target != "local" or "OMPI_MCA_btl" in job.environment_variables:
        return None
    return _SPAWN if _UNREACHABLE.search(report.exception or "") else None


def _of_keras_2(report: FailureReport, job: Job) -> str | None:
    said = report.exception or ""
    if job.environment_variables.get("TF_USE_LEGACY_KERAS") == "1":
        return None
    if _OF_KERAS_2.search(said):
        return _LEGACY_KERAS
    told = "\n".join([report.traceback or "", *report.last_lines])
    is_keras = "keras" in told.lower() or ("is not callable" in said and ".variables()" in told)
    return _LEGACY_KERAS if is_keras and _PERHAPS_OF_KERAS_2.search(said) else None


def _of_source(report: FailureReport, job: Job) -> str | None:
    if job.restart_on_exception and (report.attempt or 1) <= job.max_restarts and comes_again(report):
        return "It would come again with each attempt, so none follows. Fix the source and submit it again."
    return None


def edit_for(report: FailureReport) -> str | None:
    """Return a sentence with the code change that an old script needs, or None."""
    said = report.exception or ""
    for pattern, edit in _COMPILED:
        if (match := pattern.search(said)) is not None:
            name = next((group for group in match.groups() if group), "")
            return edit.format(name, _PLAIN.get(name, name))
    return None


def missing_text(
    exception: str,
    job: Job,
    at: Place,
    not_copied: Sequence[NotCopied],
    *,
    is_shared: bool,
    exists: Callable[[str], bool] = os.path.lexists,
) -> str | None:
    """Return a sentence that says where a missing file is, or None.

    The sentence names the option with which a new run finds the file. A missing module counts as a file.

    exception: The last line of the exception that the script raised.
    at: The run's working directory, and the folder on the submitting machine from which it was copied.
    not_copied: Files of the original folder that were not copied.
    is_shared: Whether the nodes see the user's own folders, so that the run has links to files that were not copied.
    """
    file, module = _FILE.search(exception), _MODULE.search(exception)
    if file is not None:
        names = [file[1]]
    elif module is not None:
        # The module may be a folder or file in the working directory or in the script's folder.
        name = module[1].partition(".")[0]
        names = [
            name,
            f"{name}.py",
            *(os.path.join(os.path.dirname(job.entry_script), one) for one in (name, f"{name}.py")),
        ]
    else:
        return None
    # A supervisor on a cluster may not see the user's folders.
    sees_source = exists(at.source)
    for name in names:
        path = os.path.normpath(os.path.join(at.source, job.working_directory or "", _users_own(name)))
        inside = os.path.relpath(path, at.source)
        for one in not_copied:
            if f"{inside}/".startswith(f"{one.path}/") and (exists(path) or not sees_source):
                typed = os.path.relpath(inside, job.working_directory or ".")
                return _of_not_copied(
                    path, one, inside, typed, is_shared=is_shared and sees_source, is_there=exists(path)
                )
        if job.working_directory is None and inside.split(os.sep)[0] == ".." and exists(path):
            above = os.path.commonpath((path, at.source))
            return f"It is there as {path!r}, above the source folder, which alone is copied. Give source_directory={above!r}."
    # A missing submodule is not a missing package: the installed version of its package may lack it.
    if module is None or "." in module[1] or module[1] in sys.stdlib_module_names:
        return None
    name = DISTRIBUTIONS.get(module[1], module[1])
    return f"It is not installed in the run's environment. Install it there: --pip {name} (pip_packages=[{name!r}])."


def _users_own(name: str) -> str:
    """Strip the run's working directory from a path; return other paths unchanged."""
    return re.sub(r"^.*/runs/[^/]+/work(?=/)", "", name)


def _of_not_copied(
    path: str, one: NotCopied, inside: str, typed: str, *, is_shared: bool, is_there: bool
) -> str | None:
    whole = os.path.normpath(os.path.join(typed, os.path.relpath(one.path, inside)))
    if is_shared:
        if one.is_linked:
            return None  # the run can read this file by a link, so the error is about another file
        return f"It is there as {path!r}, among {one.why}, which a run does not see. Bring them: --link {whole}."
    there = f"It is there as {path!r} on the submitting machine"
    if not is_there:
        there = f"{one.path!r} lies on the submitting machine"
        if one.is_sent:
            return None  # only the machine that got the folder knows whether it held the file
    if not one.is_sent:
        return f"{there}, and was not sent: {one.kept_back or one.why}. Send it: --send {whole} (send=[{one.path!r}])."
    parts = os.path.relpath(inside, one.path).split(os.sep)
    if why := next(filter(None, (why_kept(part, is_folder=True, named=False) for part in parts)), None):
        return f"{there}, and was not sent: {why}. Send it: --send {typed} (send=[{inside!r}])."
    return (
        f"{there}, and was sent with the copy of the source. Open it by its path from the working directory: {typed!r}."
    )
