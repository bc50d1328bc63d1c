"""Two nodes that train together: a few steps of torch; and the digits example, with the same result as on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from tests.engines.conftest import require_engine
from tests.engines.lab import Lab, wait_for_end
from tests.engines.places import TWO, place
from tests.warm import submitting_with, warm_python

EXAMPLE = Path(__file__).parents[3] / "examples" / "digits"

#: This script solves least squares: each rank with half of the samples, and for comparison one process with all samples.
STEPS = """
import torch, torch.distributed as dist

dist.init_process_group("gloo")
x = torch.arange(24.0).reshape(8, 3).sin()
y = x @ torch.tensor([1.0, -2.0, 3.0])

def gradient(weights, x, y):
    return 2 * x.T @ (x @ weights - y) / len(x)

together = alone = torch.zeros(3)
for step in range(20):
    mine = gradient(together, x[dist.get_rank() :: 2], y[dist.get_rank() :: 2])
    dist.all_reduce(mine)
    together = together - 0.2 * mine / 2
    alone = alone - 0.2 * gradient(alone, x, y)
torch.testing.assert_close(together, alone)
assert not torch.equal(alone, torch.zeros(3))
if dist.get_rank() == 0:
    print("learned", flush=True)
dist.destroy_process_group()
"""


def trained(lab: Lab, target: str) -> pl.Run:
    """A run of the example on two nodes."""
    estimator = pl.PyTorch(
        source_directory=EXAMPLE,
        entry_script="train.py",
        script_params={"--epochs": 2, "--seed": 7},
        compute_target=target,
        node_count=2,
        distributed_backend="gloo",
        # With more threads, sums could be rounded in a different order.
        environment_variables={"OMP_NUM_THREADS": "1"},
    )
    run = lab.experiment.submit(estimator)
    wait_for_end(run)
    run.wait_for_completion()
    return run


def learned(run: pl.Run) -> dict[str, Any]:
    """Loss and accuracy of the last epoch."""
    told = json.loads((run.folder.outputs / "metrics.json").read_text())
    last: dict[str, Any] = told["epochs"][-1]
    assert told["world_size"] == 2
    assert run.get_metrics()["accuracy"][-1] == last["accuracy"]
    return last


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    for name in ("torch", "sklearn", "matplotlib"):
        require_engine(name, importlib.util.find_spec(name))
    folder = tmp_path_factory.mktemp("here")
    # Fork both workers from a program that has already loaded what the example imports.
    with warm_python(folder / "warm", "sklearn.datasets", "matplotlib.pyplot") as python, submitting_with(python):
        return learned(trained(Lab(folder), "local"))


# Only `make proof` runs this test, because the next test trains on the same hosts in less time.
@pytest.mark.proof
@pytest.mark.parametrize("way", ["ssh", "slurm", "ray, shared folder"])
def test_digits_training_over_ssh_slurm_or_ray_reaches_the_same_loss_as_on_this_machine(
    way: str, here: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with place(way, request, tmp_path, monkeypatch) as there:
        found = learned(trained(there.lab, "there"))
    assert here["accuracy"] > 0.9
    # In 90 steps, a single float32 sum may be rounded differently. That may change the result of one of the 360 test images.
    assert found["loss"] == pytest.approx(here["loss"], rel=1e-3)
    assert found["accuracy"] == pytest.approx(here["accuracy"], abs=1 / 360)


# Only `make proof` runs this test, because the conformance tests cover several nodes.
@pytest.mark.proof
@pytest.mark.parametrize("way", ["ssh"])
def test_two_hosts_train_together_without_hostname_warnings(
    way: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_engine("torch", importlib.util.find_spec("torch"))
    with place(way, request, tmp_path, monkeypatch) as there:
        run = there.lab.complete(STEPS, **TWO, environment_variables={"OMP_NUM_THREADS": "1"})
    # The lab's name server does not answer, so torch prints this warning on every rank.
    assert "[c10d] The hostname" in (run.folder.logs / "rank_1.log").read_text()
    shown = subprocess.run(
        [sys.executable, "-m", "paceline", "logs", run.id],
        env=os.environ | {"PACELINE_WORKSPACE": str(there.lab.workspace_dir)},
        capture_output=True,
        text=True,
        check=True,
    )
    # Only rank 0 prints a line of its own.
    assert shown.stdout == "[rank 0] learned\n"
