"""Workers that are reported to have trained alone: scripts that end with these modules loaded, each in a separate process."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import paceline
from paceline.worker import alone
from tests.engines.conftest import require_module
from tests.warm import TENSORFLOW, TORCH, run_alone

SOURCE = Path(paceline.__file__).parent.parent
MAIN = SOURCE / "paceline/worker/__main__.py"

TRAINS = """
import torch
def train():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
train()
"""
#: This script joins a process group of one rank, where each of two ranks should have joined a group of two.
JOINS = """
import sys, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.path[0] + "/met", rank=0, world_size=1)
dist.destroy_process_group()
"""
EVALUATES = "import torch\nwith torch.no_grad():\n    torch.nn.Linear(2, 1)(torch.ones(3, 2))\n"
LIGHTNING = "import sys, types\nsys.modules['lightning'] = types.ModuleType('lightning')\n"
KERAS = """
import numpy, tensorflow as tf
def train():
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(numpy.ones((4, 2)), numpy.ones((4, 1)), verbose=0)
train()
"""


def noted(tmp_path: Path, script: str, world_size: int = 2, **variables: str) -> dict[str, str] | None:
    """Return the notes of a worker of rank 1 that runs this script."""
    folder = tmp_path / "run/attempts/1"
    folder.mkdir(parents=True, exist_ok=True)
    (tmp_path / "train.py").write_text(script)
    path = folder / "alone_1.json"
    path.unlink(missing_ok=True)
    environment = {
        **os.environ,
        **{
            "PACELINE_RANK": "1",
            "PACELINE_WORLD_SIZE": str(world_size),
            "RANK": "1",
            "WORLD_SIZE": str(world_size),
            "PACELINE_RUN_DIR": str(tmp_path / "run"),
        },
        **{"PACELINE_ATTEMPT": "1", "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        **{"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
        **variables,
    }
    kind = TENSORFLOW if script == KERAS else TORCH
    # The fork has loaded what the script imports, and nothing else.
    done = run_alone(str(MAIN), "--", "train.py", loaded=kind, environment=environment, hides=True)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text()) if path.exists() else None


def test_worker_that_trains_without_joining_a_process_group_is_recorded(tmp_path):
    # Regression: each of two workers trained alone as rank 0 of 1, and the run ended as Completed without a message.
    require_module("torch")
    assert noted(tmp_path, TRAINS) == {"library": "torch"}
    assert noted(tmp_path, TRAINS + LIGHTNING + "sys.exit(0)\n") == {"library": "lightning"}
    assert noted(tmp_path, TRAINS + "import torch.distributed.checkpoint\n") == {"library": "torch"}, (
        "it saves by itself"
    )


def test_workers_that_joined_a_group_or_did_not_train_are_not_recorded(tmp_path):
    require_module("torch")
    assert noted(tmp_path, TRAINS + JOINS) is None, "its group was destroyed before the end"
    assert noted(tmp_path, EVALUATES) is None, "it has trained nothing"
    assert noted(tmp_path, TRAINS + "import torch.distributed.launcher\n") is None, "workers of its own may have"
    assert noted(tmp_path, TRAINS, world_size=1) is None, "there is nobody to join"
    assert noted(tmp_path, TRAINS, PACELINE_SEPARATE_WORKERS="1") is None, "it is meant"
    assert noted(tmp_path, TRAINS + "import os\nos._exit(0)\n") is None, "it did not come to its end"


def test_keras_model_trained_without_a_strategy_is_recorded(tmp_path):
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("needs tensorflow")
    assert noted(tmp_path, KERAS) == {"library": "tensorflow"}


def module(**attributes) -> ModuleType:
    made = ModuleType("made")
    vars(made).update(attributes)
    return made


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (SimpleNamespace(client=None, num_processes=None), "jax"),
        (SimpleNamespace(client=object(), num_processes=2), None),
        (SimpleNamespace(client=None, num_processes=2), None),  # JAX's state after jax.distributed.shutdown()
    ],
    ids=["alone", "joined", "left"],
)
def test_jax_worker_counts_as_training_alone_unless_it_has_joined_a_process_group(state, expected):
    modules = {"jax": module(), "optax": module(), "jax._src.distributed": module(global_state=state)}
    assert alone.trained_alone(modules) == expected


def test_tensorflow_worker_counts_as_joined_if_its_context_has_a_collective_leader():
    state = {"_server_def": None, "_collective_ops_server_def": None, "_collective_leader": ""}
    context = SimpleNamespace(**state)
    modules = {"tensorflow.python.eager.context": module(_context=context)}
    assert not alone._joined_tensorflow(modules)
    context._collective_leader = "/job:worker/replica:0/task:0"
    assert alone._joined_tensorflow(modules)
