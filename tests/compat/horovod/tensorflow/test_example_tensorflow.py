"""The TensorFlow script of `examples/` runs as it is, with nothing but the folder of names on its path."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.compat import shim_dir
from tests.compat.horovod.conftest import run_on_ranks
from tests.engines.conftest import require_module
from tests.warm import TENSORFLOW

SCRIPT = Path(__file__).parents[4] / "examples" / "horovod_tensorflow" / "train.py"


# `make test` runs only the torch example. The checks of this folder and of `keras/` train the same digits.
@pytest.mark.proof
@pytest.mark.parametrize(("ranks", "options"), [(1, ()), (2, ("--fp16-allreduce",))])
def test_tensorflow_example_learns_the_digits(ranks, options):
    require_module("tensorflow")
    variables = {"PYTHONPATH": str(shim_dir()), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = run_on_ranks(ranks, SCRIPT, "--epochs", "6", *options, loaded=TENSORFLOW, **variables)
    assert done.returncode == 0, done.stderr
    accuracies = [float(found) for found in re.findall(r"accuracy (0\.\d+)", done.stdout)]
    assert len(accuracies) == 6, done.stdout
    assert accuracies[-1] > 0.8
