"""The Keras script of `examples/` runs as it is, with nothing but the folder of names on its path."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from paceline.compat import shim_dir
from tests.compat.horovod.conftest import run_on_ranks
from tests.engines.conftest import require_engine
from tests.warm import KERAS_ON_TORCH, TENSORFLOW

SCRIPT = Path(__file__).parents[4] / "examples" / "horovod_keras" / "train.py"


# `make test` runs only the torch example. The checks of every Keras train the same digits.
@pytest.mark.proof
@pytest.mark.parametrize(
    ("backend", "ranks", "options"),
    [
        ("tensorflow", 1, ()),
        ("tensorflow", 2, ("--fp16-allreduce",)),
        ("torch", 2, ("--backward-passes-per-step", "2")),
    ],
)
def test_keras_example_learns_the_digits(tmp_path, backend, ranks, options):
    for need in ("keras", backend, "sklearn"):
        require_engine(need, importlib.util.find_spec(need))
    saved = tmp_path / "digits.keras"
    variables = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(shim_dir())}
    loaded = KERAS_ON_TORCH if backend == "torch" else TENSORFLOW
    done = run_on_ranks(ranks, SCRIPT, "--epochs", "5", "--save-to", str(saved), *options, loaded=loaded, **variables)
    assert done.returncode == 0, done.stderr
    accuracies = [float(found) for found in re.findall(r"accuracy (0\.\d+)", done.stdout)]
    assert len(accuracies) == 5, done.stdout
    assert accuracies[-1] > 0.75
    assert saved.stat().st_size
