from __future__ import annotations

import dataclasses

import pytest

from paceline.runs.failure import FailureReport
from paceline.supervisor.diagnosis.hints import with_hints
from tests.helpers import make_job

GPUS = {"use_gpu": True, "framework": "pytorch"}


def report(exception: str | None) -> FailureReport:
    return FailureReport(cause="exception", message="Rank 1 failed.", exception=exception)


def test_a_failure_that_speaks_for_itself_is_left_alone():
    told = report("ValueError: bad batch")
    assert with_hints(told, make_job()) is told


@pytest.mark.parametrize(
    ("visibility", "use_gpu", "is_told"), [("worker", True, True), ("node", True, False), ("worker", False, False)]
)
def test_a_script_that_takes_the_gpu_of_its_local_rank_is_told_of_gpu_visibility(visibility, use_gpu, is_told):
    job = make_job(use_gpu=use_gpu, gpu_visibility=visibility)
    told = with_hints(report("RuntimeError: CUDA error: invalid device ordinal"), job)
    assert ("gpu_visibility='node'" in told.message) == is_told


def test_a_kernel_s_assertion_is_told_with_how_to_find_its_line():
    lines = ("Indexing.cu:1515: block: [0,0,0] Assertion `srcIndex < srcSelectDimSize` failed.", "Traceback")
    failed = dataclasses.replace(
        report("torch.AcceleratorError: CUDA error: device-side assert triggered"), last_lines=lines
    )
    told = with_hints(failed, make_job(use_gpu=True)).message
    assert "given a wrong value (srcIndex < srcSelectDimSize does not hold), most often an index out of range" in told
    assert "--env CUDA_LAUNCH_BLOCKING=1" in told
    blocking = make_job(use_gpu=True, environment_variables={"CUDA_LAUNCH_BLOCKING": "1"})
    assert "LAUNCH_BLOCKING" not in with_hints(failed, blocking).message


def test_fit_under_keras_3_is_told_what_works():
    told = with_hints(report("ValueError: Attempt to convert a value (PerReplica:{"), make_job())
    assert told.message.startswith("Rank 1 failed. Under tf.distribute's strategies")
    assert "TF_USE_LEGACY_KERAS" in told.message


@pytest.mark.parametrize(
    ("exception", "line"),
    [
        ("TypeError: 'list' object is not callable", "hvd.broadcast_variables(opt.variables(), root_rank=0)"),
        ("TypeError: Trainer.compile() got an unexpected keyword argument 'experimental_run_tf_function'", ""),
        ("ValueError: Argument(s) not recognized: {'lr': 0.1}", ""),
        ("AttributeError: module 'keras.backend' has no attribute 'get_session'", ""),
        ("AttributeError: 'Sequential' object has no attribute 'fit_generator'", ""),
        ("AttributeError: 'SGD' object has no attribute 'lr'", "tf.keras.backend.set_value(opt.lr, 0.1)"),
        ("ImportError: `keras.optimizers.legacy` is not supported in Keras 3.", ""),
        ("ModuleNotFoundError: No module named 'keras.layers.core'", ""),
    ],
)
def test_a_script_for_keras_2_is_told_how_it_runs(exception, line):
    told = dataclasses.replace(
        report(exception), traceback=f"Traceback (most recent call last):\n  {line}\n{exception}"
    )
    job = make_job(environment_variables={"TF_USE_LEGACY_KERAS": "1"})
    assert "pip_packages=['tf_keras']" in with_hints(told, make_job()).message
    assert "TF_USE_LEGACY_KERAS" in with_hints(told, make_job()).message
    assert with_hints(told, job) is told


@pytest.mark.parametrize(
    "exception", ["AttributeError: 'SGD' object has no attribute 'lr'", "TypeError: 'list' object is not callable"]
)
def test_what_other_libraries_say_too_is_not_taken_for_keras(exception):
    told = dataclasses.replace(report(exception), traceback="  import torch\n  print(opt.lr, losses())")
    assert with_hints(told, make_job()) is told


def test_what_the_ranks_waited_for_comes_last():
    told = with_hints(report(None), make_job(), "At its end the ranks were stalled: x.")
    assert told.message == "Rank 1 failed. At its end the ranks were stalled: x."


def test_of_a_script_that_can_not_be_loaded_is_said_why_no_attempt_follows_if_one_was_asked_for():
    told = report("SyntaxError: invalid syntax")
    asked = make_job(max_restarts=1, restart_on_exception=True)
    assert with_hints(told, asked).message.endswith("so none follows. Mend the source and submit it again.")
    assert with_hints(told, make_job(max_restarts=1)) is told
    assert with_hints(dataclasses.replace(told, attempt=2), asked).message == told.message


@pytest.mark.parametrize(
    ("values", "is_told"),
    [
        ({"distributed_backend": "mpi"}, True),
        ({"distributed_backend": "mpi", "environment_variables": {"OMPI_MCA_btl": "self,vader,tcp"}}, False),
        ({"distributed_backend": "gloo"}, False),
    ],
)
def test_a_script_that_starts_processes_by_mpi_is_told_what_it_needs(values, is_told):
    told = with_hints(report("mpi4py.MPI.Exception: MPI_ERR_INTERN: internal error"), make_job(**values))
    assert ("OMPI_MCA_btl=self,vader,tcp" in told.message) == is_told


#: The innermost calls of a process that loads a library's compiled part, as faulthandler writes them.
OF_A_LIBRARY = """Fatal Python error: Segmentation fault
Current thread 0x00007f1f2b4f5740 (most recent call first):
  File "<frozen importlib._bootstrap>", line 241 in _call_with_frames_removed
  File "<frozen importlib._bootstrap_external>", line 1176 in create_module
  File "<frozen importlib._bootstrap>", line 573 in module_from_spec
  File "<frozen importlib._bootstrap>", line 1176 in _find_and_load
  File "/venv/lib/python3.11/site-packages/{library}/knobs.py", line 15 in <module>
"""
OF_A_KERNEL = """Fatal Python error: Segmentation fault
Current thread 0x00007f1f2b4f5740 (most recent call first):
  File "/venv/lib/python3.11/site-packages/triton/runtime/jit.py", line 700 in run
"""


@pytest.mark.parametrize(
    ("stack", "is_told"),
    [
        (OF_A_LIBRARY.format(library="triton"), True),
        (OF_A_LIBRARY.format(library="numpy"), False),
        (OF_A_KERNEL, False),
    ],
    ids=["triton", "numpy", "a kernel"],
)
@pytest.mark.parametrize("signal", ["SIGSEGV", "SIGABRT"])
def test_crash_while_triton_loads_names_the_import_order_that_works(stack: str, is_told: bool, signal: str) -> None:
    failed = FailureReport(cause="killed", message="The worker failed.", signal=signal, traceback=stack)
    told = with_hints(failed, make_job()).message
    assert ("Write `import triton` above `import tensorflow`" in told) == is_told
