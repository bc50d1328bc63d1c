from __future__ import annotations

import pytest

from paceline.runs.failure import FailureReport
from paceline.supervisor.diagnosis.hints import with_hints
from paceline.supervisor.diagnosis.old_scripts import edit_for
from tests.helpers import make_job


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
def test_a_script_of_years_ago_is_told_the_edit(exception, edit):
    told = with_hints(FailureReport(cause="exception", message="Rank 0 failed.", exception=exception), make_job())
    assert told.message.startswith("Rank 0 failed. ")
    assert edit in told.message


def test_any_other_exception_is_left_alone():
    for said in ("ValueError: bad batch", "AttributeError: module 'numpy' has no attribute 'floot'", None):
        assert edit_for(FailureReport(cause="exception", message="", exception=said)) is None
