"""Ray Tune's side, by the way that its documentation has for trials of several workers: a TorchTrainer in each trial.

Prints a JSON line: the seconds of `Tuner.fit`, without the start of Ray, and how many trials ended well with a loss.
https://docs.ray.io/en/latest/train/user-guides/hyperparameter-optimization.html
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
# Ray Train looks every 2 s at what its workers have reported, and a trial here takes less.
os.environ["RAY_TRAIN_HEALTH_CHECK_INTERVAL_S"] = "0.1"
# Whatever a trial's worker needs of this folder.
sys.path.insert(0, str(Path(__file__).parent))

import ray
import ray.train
import ray.train.torch
import ray.tune
from ray.tune.integration.ray_train import TuneReportCallback
from work import losses


def worker(config: dict[str, Any]) -> None:
    ray.train.report({"loss": losses(config["lr"])[-1]})


def trial(config: dict[str, Any]) -> None:
    ray.train.torch.TorchTrainer(
        worker,
        train_loop_config=config,
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            name=ray.tune.get_context().get_trial_id(), storage_path=config["folder"], callbacks=[TuneReportCallback()]
        ),
    ).fit()


def main(folder: str, trials: int, concurrent: int) -> None:
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_cpus=2 * concurrent + 1,
        include_dashboard=False,
        logging_level="error",
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
    )
    tuner = ray.tune.Tuner(
        # The trial itself only waits for its workers. Nothing at all is not taken.
        ray.tune.with_resources(trial, {"CPU": 0.01}),
        param_space={"lr": ray.tune.loguniform(1e-3, 1e-1), "folder": folder},
        tune_config=ray.tune.TuneConfig(
            metric="loss", mode="min", num_samples=trials, max_concurrent_trials=concurrent
        ),
        run_config=ray.tune.RunConfig(name="tuned", storage_path=folder, verbose=0),
    )
    before = time.monotonic()
    results = tuner.fit()
    took = time.monotonic() - before
    whole = sum(not result.error and "loss" in result.metrics for result in results)
    print(json.dumps({"seconds": took, "whole": whole, "version": ray.__version__}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
