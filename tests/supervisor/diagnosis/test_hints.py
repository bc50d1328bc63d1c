from __future__ import annotations

import dataclasses

import pytest

from paceline.runs.failure import FailureReport
from paceline.runs.work_dir import Place
from paceline.supervisor.diagnosis.hints import edit_for, missing_text, with_hints
from paceline.system.linked import NotCopied
from tests.helpers import make_job

GPUS = {"use_gpu": True, "framework": "pytorch"}

AT = Place("home/ann/p", "home/ann/p", "/home/ann/p")
NOT_COPIED = [
    NotCopied(path="data", why="ignored", is_linked=True, is_folder=True, kept_back="more than 1 GB"),
    NotCopied(path="out", why="results of earlier runs", is_linked=False, is_folder=True),
    NotCopied(path="lib", why="ignored by 'lib' in .gitignore", is_linked=True, is_folder=True, is_sent=True),
]


def report(exception: str | None) -> FailureReport:
    return FailureReport(cause="exception", message="Rank 1 failed.", exception=exception)


def test_failure_with_a_clear_message_gets_no_hint():
    told = report("ValueError: bad batch")
    assert with_hints(told, make_job()) is told


@pytest.mark.parametrize(
    ("visibility", "use_gpu", "is_told"), [("worker", True, True), ("node", True, False), ("worker", False, False)]
)
def test_invalid_device_ordinal_hints_at_gpu_visibility(visibility, use_gpu, is_told):
    job = make_job(use_gpu=use_gpu, gpu_visibility=visibility)
    told = with_hints(report("RuntimeError: CUDA error: invalid device ordinal"), job)
    assert ("gpu_visibility='node'" in told.message) == is_told


def test_device_side_assert_hints_at_cuda_launch_blocking():
    lines = ("Indexing.cu:1515: block: [0,0,0] Assertion `srcIndex < srcSelectDimSize` failed.", "Traceback")
    failed = dataclasses.replace(
        report("torch.AcceleratorError: CUDA error: device-side assert triggered"), last_lines=lines
    )
    told = with_hints(failed, make_job(use_gpu=True)).message
    assert "given a wrong value (srcIndex < srcSelectDimSize does not hold), most often an index out of range" in told
    assert "--env CUDA_LAUNCH_BLOCKING=1" in told
    blocking = make_job(use_gpu=True, environment_variables={"CUDA_LAUNCH_BLOCKING": "1"})
    assert "LAUNCH_BLOCKING" not in with_hints(failed, blocking).message


def test_tf_distribute_error_under_keras_3_gets_a_hint_at_tf_use_legacy_keras():
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
def test_keras_2_script_hints_at_legacy_keras(exception, line):
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
def test_similar_errors_of_other_libraries_get_no_keras_hint(exception):
    told = dataclasses.replace(report(exception), traceback="  import torch\n  print(opt.lr, losses())")
    assert with_hints(told, make_job()) is told


def test_failure_message_ends_with_the_text_about_stalled_ranks():
    told = with_hints(report(None), make_job(), "At its end the ranks were stalled: x.")
    assert told.message == "Rank 1 failed. At its end the ranks were stalled: x."


def test_failure_report_of_a_syntax_error_explains_why_the_run_is_not_restarted():
    told = report("SyntaxError: invalid syntax")
    asked = make_job(max_restarts=1, restart_on_exception=True)
    assert with_hints(told, asked).message.endswith("so none follows. Fix the source and submit it again.")
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
def test_mpi_spawn_error_hints_at_the_btl_setting(values, is_told):
    told = with_hints(report("mpi4py.MPI.Exception: MPI_ERR_INTERN: internal error"), make_job(**values))
    assert ("OMPI_MCA_btl=self,vader,tcp" in told.message) == is_told


#: The innermost calls of a process that loads the compiled part of a library, as faulthandler writes them.
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


@pytest.mark.promise("script-imports-tensorflow-then-torch")
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
def test_crash_while_importing_triton_gets_a_hint_with_the_working_import_order(
    stack: str, is_told: bool, signal: str
) -> None:
    failed = FailureReport(cause="killed", message="The worker failed.", signal=signal, traceback=stack)
    told = with_hints(failed, make_job()).message
    assert ("Write `import triton` above `import tensorflow`" in told) == is_told


@pytest.mark.promise("scripts-years-ago-told-edit")
@pytest.mark.parametrize(
    ("exception", "edit"),
    [
        ("AttributeError: module 'numpy' has no attribute 'float'.", "write float."),
        ("AttributeError: module 'numpy' has no attribute 'unicode'.", "write str."),
        ("ModuleNotFoundError: No module named 'sklearn.externals.joblib'", "import joblib"),
        ("IndexError: invalid index of a 0-dim tensor. Use `tensor.item()` in Python", "loss.item()"),
        ("AssertionError: Torch not compiled with CUDA enabled", "torch.cuda.is_available()"),
        ("ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!", "'gloo'"),
        ("_pickle.UnpicklingError: Weights only load failed. In PyTorch 2.6", "weights_only=False"),
        ("AttributeError: module 'tensorflow' has no attribute 'placeholder'", "tensorflow.compat.v1"),
        ("ModuleNotFoundError: No module named 'tensorflow.contrib'", "tf.contrib ended"),
        ("ModuleNotFoundError: No module named 'horovod.spark'", "horovod.spark is not here"),
        ("ValueError: The filename must end in `.weights.h5`. Received: filepath=x.h5", "weights.h5"),
        ("ImportError: cannot import name 'Mapping' from 'collections' (x)", "collections.abc import Mapping"),
    ],
)
def test_error_from_a_removed_api_gets_a_hint_with_the_replacement(exception, edit):
    told = with_hints(FailureReport(cause="exception", message="Rank 0 failed.", exception=exception), make_job())
    assert told.message.startswith("Rank 0 failed. ")
    assert edit in told.message


def test_unrelated_exception_gets_no_hint_to_edit_the_script():
    for said in ("ValueError: bad batch", "AttributeError: module 'numpy' has no attribute 'floot'", None):
        assert edit_for(FailureReport(cause="exception", message="", exception=said)) is None


def told(
    exception: str, *, is_shared: bool = True, cwd: str | None = ".", there: bool = True, sees_source: bool = True
) -> str | None:
    job = make_job(working_directory=cwd)
    return missing_text(
        exception,
        job,
        AT,
        NOT_COPIED,
        is_shared=is_shared,
        exists=lambda path: sees_source if path == AT.source else there,
    )


@pytest.mark.promise("report-missing-file-says-option")
@pytest.mark.parametrize(
    ("name", "cwd", "option"),
    [
        ("out/a.pt", ".", "--link out"),
        ("../out/a.pt", "src", "--link ../out"),
        ("/x/ws/runs/p_1_2/work/home/ann/p/out/a.pt", ".", "--link out"),
        ("/home/ann/p/out/a.pt", ".", "--link out"),
    ],
)
def test_hint_for_a_file_among_earlier_results_names_the_option_that_provides_it(
    name: str, cwd: str, option: str
) -> None:
    text = told(f"FileNotFoundError: [Errno 2] No such file or directory: '{name}'", cwd=cwd)
    path = "'/home/ann/p/out/a.pt'"
    assert (
        text == f"It is there as {path}, among results of earlier runs, which a run does not see. Bring them: {option}."
    )


@pytest.mark.parametrize(
    ("exception", "end"),
    [
        ("No such file or directory: 'data/x.txt'", "not sent: more than 1 GB. Send it: --send data (send=['data'])."),
        ("No such file or directory: 'out/x.pt'", "results of earlier runs. Send it: --send out (send=['out'])."),
        ("No such file or directory: 'lib/.env'", "that of a secret. Send it: --send lib/.env (send=['lib/.env'])."),
        ("No such file or directory: '/home/ann/p/lib/a'", "Open it by its path from the working directory: 'lib/a'."),
    ],
)
def test_hint_for_missing_data_names_the_option_that_sends_the_data(exception: str, end: str) -> None:
    exception = f"FileNotFoundError: [Errno 2] {exception}"
    text = told(exception, is_shared=False)
    assert text is not None
    assert text.endswith(end)


def test_missing_file_hint_on_a_cluster_names_unsent_files() -> None:
    """On a cluster: its nodes share a folder with it, and neither has the user's."""
    start = "FileNotFoundError: [Errno 2] No such file or directory: "
    assert (
        told(f"{start}'data/x.txt'", there=False, sees_source=False)
        == "'data' lies on the submitting machine, and was not sent: more than 1 GB. Send it: --send data (send=['data'])."
    )
    assert told(f"{start}'lib/x.txt'", there=False, sees_source=False) is None


def test_missing_file_in_a_linked_data_folder_gets_no_hint_if_the_run_sees_the_folder() -> None:
    assert told("FileNotFoundError: [Errno 2] No such file or directory: 'data/x.txt'") is None


@pytest.mark.promise("report-missing-file-says-option")
def test_missing_file_above_the_source_directory_gets_a_hint_with_the_source_directory_to_set() -> None:
    exception = "FileNotFoundError: [Errno 2] No such file or directory: '../conf/a.yaml'"
    text = told(exception, cwd=None)
    assert text is not None
    assert text.endswith("which alone is copied. Give source_directory='/home/ann'.")
    assert told(exception, cwd=None, there=False) is None


def test_unrelated_errors_get_no_missing_file_hint() -> None:
    assert told("ValueError: 'out/a.pt'") is None
    assert told("FileNotFoundError: [Errno 2] No such file or directory: 'nowhere'") is None
    assert told("FileNotFoundError: [Errno 2] No such file or directory: 'out/a.pt'", there=False) is None


def test_hint_for_a_missing_module_names_the_option_that_installs_the_package() -> None:
    for module, name in (("tabulate", "tabulate"), ("yaml", "pyyaml")):
        text = told(f"ModuleNotFoundError: No module named '{module}'", there=False)
        assert text is not None
        assert text.endswith(f"Install it there: --pip {name} (pip_packages=['{name}']).")
    for module in ("sklearn.externals", "tomllib"):
        assert told(f"ModuleNotFoundError: No module named '{module}'", there=False) is None
