"""The digits example on two nodes of each kind of target: it learns what it learns on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from tests.engines.conftest import require_engine
from tests.engines.lab import Lab, wait_for_end
from tests.engines.places import place
from tests.warm import submitting_with, warm_python

pytestmark = pytest.mark.timeout(180)

EXAMPLE = Path(__file__).parents[3] / "examples" / "digits"


def trained(lab: Lab, target: str) -> pl.Run:
    """A run of the example on two nodes."""
    estimator = pl.PyTorch(
        source_directory=EXAMPLE,
        entry_script="train.py",
        script_params={"--epochs": 2, "--seed": 7},
        compute_target=target,
        node_count=2,
        distributed_backend="gloo",
        # With as many threads as a node has cores, sums would be rounded in another order.
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
    # Both workers have what the example imports from one program that has loaded it.
    with warm_python(folder / "warm", "sklearn.datasets", "matplotlib.pyplot") as python, submitting_with(python):
        return learned(trained(Lab(folder), "local"))


# Workers of Slurm's and Ray's nodes meet each other in the suite of targets.
@pytest.fixture(
    scope="module",
    params=["ssh", *(pytest.param(way, marks=pytest.mark.proof) for way in ("slurm", "ray, shared folder"))],
)
def there(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[pl.Run]:
    for name in ("torch", "sklearn", "matplotlib"):
        require_engine(name, importlib.util.find_spec(name))
    folder = tmp_path_factory.mktemp("there")
    with pytest.MonkeyPatch.context() as monkeypatch, place(request.param, request, folder, monkeypatch) as found:
        yield trained(found.lab, "there")


def test_the_digits_are_learned_as_on_this_machine(there: pl.Run, here: dict[str, Any]) -> None:
    assert here["accuracy"] > 0.9
    found = learned(there)
    # One rounding of a 32-bit sum may fall another way over 90 steps; of 360 test images that may turn one.
    assert found["loss"] == pytest.approx(here["loss"], rel=1e-3)
    assert found["accuracy"] == pytest.approx(here["accuracy"], abs=1 / 360)


@pytest.mark.parametrize("there", ["ssh"], indirect=True)
def test_what_torch_says_of_hosts_without_names_is_passed_over(there: pl.Run) -> None:
    # The lab has no name server that answers, so torch says so on every rank.
    assert "[c10d] The hostname" in (there.folder.logs / "rank_1.log").read_text()
    workspace = there.folder.path.parent.parent
    shown = subprocess.run(
        [sys.executable, "-m", "paceline", "logs", there.id],
        env=os.environ | {"PACELINE_WORKSPACE": str(workspace)},
        capture_output=True,
        text=True,
        check=True,
    )
    # The first rank alone prints something of its own.
    lines = [line.partition("] ") for line in shown.stdout.splitlines()]
    assert [(rank, text[:5]) for rank, _, text in lines] == [("[rank 0", "epoch")] * 2, shown.stdout
