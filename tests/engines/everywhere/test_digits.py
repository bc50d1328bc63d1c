"""The digits example on two nodes of each kind of target: it learns what it learns on this machine."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from tests.engines.conftest import require_engine
from tests.engines.lab import Lab, wait_for_end
from tests.engines.places import place

pytestmark = pytest.mark.timeout(180)

EXAMPLE = Path(__file__).parents[3] / "examples" / "digits"


def learned(lab: Lab, target: str) -> dict[str, Any]:
    """Loss and accuracy of the last epoch, of a run of the example on two nodes."""
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
    told = json.loads((run.folder.outputs / "metrics.json").read_text())
    last: dict[str, Any] = told["epochs"][-1]
    assert told["world_size"] == 2
    assert run.get_metrics()["accuracy"][-1] == last["accuracy"]
    return last


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    for name in ("torch", "sklearn", "matplotlib"):
        require_engine(name, importlib.util.find_spec(name))
    return learned(Lab(tmp_path_factory.mktemp("here")), "local")


# Workers of Slurm's and Ray's nodes meet each other in the suite of targets.
@pytest.mark.parametrize(
    "way", ["ssh", *(pytest.param(way, marks=pytest.mark.proof) for way in ("slurm", "ray, shared folder"))]
)
def test_the_digits_are_learned_as_on_this_machine(
    way: str, here: dict[str, Any], request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert here["accuracy"] > 0.9
    with place(way, request, tmp_path, monkeypatch) as there:
        found = learned(there.lab, "there")
    # One rounding of a 32-bit sum may fall another way over 90 steps; of 360 test images that may turn one.
    assert found["loss"] == pytest.approx(here["loss"], rel=1e-3)
    assert found["accuracy"] == pytest.approx(here["accuracy"], abs=1 / 360)
