"""The Horovod script of `examples/` runs as it is, with nothing but the folder of names on its path."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.compat import shim_dir
from tests.compat.horovod.conftest import run_on_ranks

SCRIPT = Path(__file__).parents[3] / "examples" / "horovod_torch" / "train.py"


# tests/docs/test_docs.py runs the example on two ranks as in the README. tests/compat/horovod/checks covers one rank.
@pytest.mark.promise("script-written-horovod-runs")
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(1, (), marks=pytest.mark.proof),
        (2, ("--fp16-allreduce",)),
        pytest.param(2, ("--use-adasum",), marks=pytest.mark.proof),
    ],
)
def test_torch_example_learns_the_digits(ranks, options):
    done = run_on_ranks(ranks, SCRIPT, "--epochs", "6", *options, PYTHONPATH=str(shim_dir()))
    assert done.returncode == 0, done.stderr
    accuracies = [float(found) for found in re.findall(r"accuracy (0\.\d+)", done.stdout)]
    assert len(accuracies) == 6, done.stdout
    assert accuracies[-1] > 0.85
