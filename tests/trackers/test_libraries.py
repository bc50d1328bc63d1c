"""Scripts that log with other libraries, unchanged, and the values in their runs. Each library is the real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import paceline
from tests.cli.conftest import Cli, cli
from tests.engines.conftest import require_engine
from tests.helpers import make_job, make_run
from tests.warm import EXAMPLES, TENSORFLOW, forking_variables

__all__ = ["cli"]

#: Whether the tests need all trackers. CI does not install all of them, but `make proof` does.
ALL = bool(os.environ.get("PACELINE_REQUIRE_TRACKERS"))


def needs(name: str) -> None:
    there = find_spec(name.partition(".")[0]) is not None
    if ALL:
        assert there, f"PACELINE_REQUIRE_TRACKERS is set, but there is no {name}"
    elif not there:
        pytest.skip(f"needs {name}, which `make proof` installs")


def values(cli: Cli, script: str, *words: str, loaded: str = EXAMPLES) -> dict[str, Any]:
    """Run it. Return metric name -> [(step, value, ...)] by rank and step. loaded: modules that its workers have loaded."""
    variables = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"} | forking_variables(loaded)
    done = cli("run", "--json", *words, cli.script(script), env=variables)
    found = json.loads(done.stdout[done.stdout.index("{\n") :])
    (one,) = cli.json("metrics", found["run_id"], *(f"--name={name}" for name in _names(cli, found["run_id"])))
    return {
        name: list(zip(one["series"][name]["steps"], one["series"][name]["values"], strict=True))
        for name in one["series"]
    }


def _names(cli: Cli, run_id: str) -> list[str]:
    (one,) = cli.json("metrics", run_id)
    return list(one["metrics"])


@pytest.mark.promise("scripts-log-tensorboard-mlflow-w")
def test_values_of_summarywriter_and_mlflow_on_two_ranks_are_logged_once(cli: Cli) -> None:
    script = """
        import os, signal, subprocess, sys, types
        # Of tensorboard alone: it would load TensorFlow where that is installed.
        sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")
        import mlflow
        from torch.utils.tensorboard import SummaryWriter
        from paceline import Run
        rank = int(os.environ["RANK"])
        writer = SummaryWriter(f"tb/rank{rank}")
        for step in range(3):
            writer.add_scalar("loss", 1.0 + step + 10 * rank, step)
        writer.add_scalar("new", 0.5, 7, new_style=True)
        writer.add_scalars("both", {"a": 1.0}, 0)
        Run.get_context().log("mine", 5.0)
        writer.add_scalar("mine", 6.0, 0)
        mlflow.set_experiment("any name at all")
        with mlflow.start_run(run_name="fit") as run:
            assert run.info.run_id == os.environ["PACELINE_RUN_ID"]
            mlflow.log_params({"lr": 0.1, "layers": 3})
            mlflow.log_metric("acc", 0.5 + rank, step=1)
            mlflow.log_metric("loss", 99.0, step=1)
            mlflow.set_tag("team", "blue")
            with mlflow.start_run(run_name="fold 1", nested=True):
                mlflow.log_metric("acc", 0.125)
            if rank == 0:
                mlflow.log_text("hello", "notes/a.txt")
                try:
                    mlflow.log_param("lr", 0.2)
                except mlflow.MlflowException as error:
                    assert "Changing param values is not allowed" in str(error)
                else:
                    raise AssertionError
            assert mlflow.get_run(run.info.run_id).data.params["lr"] == "0.1"
            assert mlflow.get_registry_uri() == mlflow.get_tracking_uri() == os.environ["MLFLOW_REGISTRY_URI"]
        # A process that the script starts finds the same store.
        if rank == 0:
            subprocess.run([sys.executable, "-c", "import mlflow; mlflow.log_metric('child', 1.5)"], check=True)
        """
    found = values(cli, script, "-j", "2", "--backend", "gloo")
    assert sorted(found) == ["acc", "both_a/both", "child", "fold-1/acc", "loss", "mine", "new"]
    assert sorted(found["loss"]) == [(0, 1.0), (0, 11.0), (1, 2.0), (1, 12.0), (2, 3.0), (2, 13.0)]
    assert sorted(found["acc"]) == [(1, 0.5), (1, 1.5)]
    assert found["mine"] == [(None, 5.0)] * 2
    assert found["new"] == [(7, 0.5)] * 2
    assert found["child"] == [(0, 1.5)]
    shown = cli.json("show")
    assert shown["properties"] == {"lr": "0.1", "layers": "3"}
    assert (shown["tags"]["team"], shown["display_name"]) == ("blue", "fit")
    assert "outputs/notes/a.txt" in shown["files"]


WRITES = """
import sys, types
sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from paceline import Run
Run.get_context().log("mine", 1.0)
writer = EventFileWriter("tb")
for tag, value in (("x", 0.5), ("mine", 2.0)):
    writer.add_event(Event(step=4, wall_time=12.0, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)])))
writer.close()
"""


@pytest.mark.promise("summarywriter-told-survives-worker-s")
def test_summarywriter_values_survive_sigkill(cli: Cli) -> None:
    script = """
        import os, sys, types
        sys.modules["tensorboard.compat.notf"] = types.ModuleType("notf")
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        writer = EventFileWriter("tb")
        writer.add_event(Event(step=4, wall_time=12.0, summary=Summary(value=[Summary.Value(tag="x", simple_value=0.5)])))
        os.kill(os.getpid(), 9)
        """
    cli("run", cli.script(script), code=137)
    assert cli.json("metrics")[0]["metrics"]["x"]["last"] == 0.5


def test_event_files_written_by_python_in_a_shell_script_become_metrics_of_the_run(cli: Cli) -> None:
    cli.script(WRITES, "src/fit.py")
    cli.script("#!/bin/sh\npython src/fit.py\n", "src/train.sh")
    (cli.folder / "src" / "train.sh").chmod(0o755)
    # This event file is older than the run: it came with the source.
    old = cli.folder / "src" / "tb" / "events.out.tfevents.1.old"
    old.parent.mkdir()
    old.write_bytes(b"not read")
    os.utime(old, (1_000_000_000, 1_000_000_000))
    cli("run", "src/train.sh")
    found = cli.json("metrics")[0]["metrics"]
    assert {name: (one["last"], one["last_step"], one["count"]) for name, one in found.items()} == {
        "mine": (1.0, None, 1),
        "x": (0.5, 4, 1),
    }
    cli("run", "--env", "PACELINE_TRACKERS=none", "src/train.sh")
    assert list(cli.json("metrics")[0]["metrics"]) == ["mine"]


@pytest.fixture
def keras() -> None:
    require_engine("tensorflow", find_spec("tensorflow"))


@pytest.mark.promise("scripts-log-tensorboard-mlflow-w")
@pytest.mark.slow
def test_values_of_keras_tensorboard_callback_are_read_from_its_files(cli: Cli, keras: None) -> None:
    script = """
        import os
        os.environ["KERAS_BACKEND"] = "tensorflow"
        import keras, numpy as np
        import tensorflow as tf
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        x = np.random.rand(64, 4)
        board = keras.callbacks.TensorBoard("tb")
        model.fit(x, x.sum(1), epochs=2, validation_split=0.25, verbose=0, callbacks=[board])
        # Never closed: the end of the script has to do.
        with tf.summary.create_file_writer("own").as_default():
            tf.summary.scalar("mine", 0.5, step=3)
        """
    found = values(cli, script, loaded=TENSORFLOW)
    assert [step for step, _ in found["train/epoch_loss"]] == [0, 1]
    assert [step for step, _ in found["validation/epoch_loss"]] == [0, 1]
    assert found["mine"] == [(3, 0.5)]


@pytest.mark.promise("scripts-log-tensorboard-mlflow-w")
@pytest.mark.slow
def test_each_value_of_several_lightning_loggers_is_logged_once(cli: Cli) -> None:
    needs("lightning")
    script = """
        import torch, lightning as L
        from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
        class Model(L.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 1)
            def training_step(self, batch, number):
                loss = self.layer(batch[0]).pow(2).mean()
                self.log("train_loss", loss)
                return loss
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), 0.1)
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(32, 4)), batch_size=4)
        loggers = [CSVLogger("csv"), TensorBoardLogger("tb")]
        L.Trainer(max_epochs=1, log_every_n_steps=1, logger=loggers, accelerator="cpu").fit(Model(), data)
        """
    found = values(cli, script)
    assert [step for step, _ in found["train_loss"]] == list(range(8))


# Only `make proof` runs this: loading transformers takes four CPU seconds, and other tests cover the libraries that it uses.
@pytest.mark.promise("scripts-log-tensorboard-mlflow-w")
@pytest.mark.slow
@pytest.mark.proof
def test_transformers_trainer_values_become_metrics(cli: Cli) -> None:
    needs("transformers")
    needs("accelerate")
    script = """
        import torch
        from transformers import Trainer, TrainingArguments
        from paceline.trackers.transformers_trainer import PacelineCallback
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 1)
            def forward(self, x=None, labels=None):
                out = self.layer(x).squeeze(-1)
                return {"loss": (out - labels).pow(2).mean(), "logits": out}
        data = [{"x": torch.rand(4), "labels": torch.tensor(1.0)} for _ in range(32)]
        for reports in ("none", "tensorboard"):
            settings = TrainingArguments(
                "out", max_steps=4, logging_steps=2, report_to=reports, use_cpu=True, save_strategy="no", disable_tqdm=True
            )
            more = [PacelineCallback()] if reports == "none" else []
            trainer = Trainer(Model(), settings, train_dataset=data, eval_dataset=data, callbacks=more)
            trainer.train()
            trainer.evaluate()
        """
    found = values(cli, script)
    assert [step for step, _ in found["loss"]] == [2, 4, 2, 4]
    assert [step for step, _ in found["eval_loss"]] == [4, 4]
    assert not {"train/loss", "eval/loss"} & set(found)


@pytest.mark.promise("scripts-log-tensorboard-mlflow-w")
@pytest.mark.slow
def test_wandb_values_become_metrics_in_offline_mode(cli: Cli) -> None:
    needs("wandb")
    script = """
        import wandb
        run = wandb.init(project="x", mode="offline")
        for step in range(3):
            wandb.log({"loss": 1.0 + step, "val": {"acc": 0.5}})
        run.log({"late": 5}, step=10)
        run.finish()
        """
    found = values(cli, script)
    assert found == {
        "loss": [(0, 1.0), (1, 2.0), (2, 3.0)],
        "val.acc": [(0, 0.5), (1, 0.5), (2, 0.5)],
        "late": [(10, 5)],
    }


@pytest.mark.slow
def test_trackio_values_become_metrics(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    script = """
        import trackio
        trackio.init(project="x", name="a")
        for step in range(3):
            trackio.log({"loss": 1.0 + step, "val": {"acc": 0.5}})
        trackio.log({"late": 5}, step=10)
        trackio.finish()
        """
    found = values(cli, script)
    assert found == {
        "loss": [(0, 1.0), (1, 2.0), (2, 3.0)],
        "val.acc": [(0, 0.5), (1, 0.5), (2, 0.5)],
        "late": [(10, 5)],
    }


MLFLOW_CLIENT = """
import sys
import mlflow, pytest, paceline
from paceline.runs.folder import RunFolder
workspace, run_id = sys.argv[1:]
client = mlflow.MlflowClient(f"paceline://{workspace}")
(experiment,) = client.search_experiments()
assert experiment.name == run_id.partition("_")[0]
(run,) = client.search_runs([experiment.experiment_id], "params.lr = '0.1'")
assert run.info.run_id == run_id
assert client.search_runs([experiment.experiment_id], "metrics.acc > 0.4") == []

made = client.create_run("0", run_name="by hand")
client.log_metric(made.info.run_id, "acc", 0.5, step=2)
client.log_param(made.info.run_id, "layers", 3)
client.set_terminated(made.info.run_id)
own = paceline.Run.get(paceline.Workspace(workspace), made.info.run_id)
assert (own.status, own.get_metrics(), own.properties) == ("Completed", {"acc": 0.5}, {"layers": "3"})
(found,) = client.search_runs(["default"], "metrics.acc > 0.4")
assert (found.info.run_name, found.info.status) == ("by hand", "FINISHED")
assert [(one.step, one.value) for one in client.get_metric_history(found.info.run_id, "acc")] == [(2, 0.5)]
with pytest.raises(mlflow.MlflowException, match="logged by another program, or has ended"):
    client.log_metric(found.info.run_id, "acc", 1.0)
with pytest.raises(mlflow.MlflowException, match="not found"):
    client.get_run("nobody_1700000000_0123abcd")
with pytest.raises(mlflow.MlflowException, match="only read through MLflow"):
    client.create_registered_model("m")
(model,) = client.search_registered_models()
assert (model.name, model.latest_versions[0].version, model.aliases) == ("digits", "1", {"best": "1"})
assert client.get_model_version_by_alias("digits", "best").source.endswith("/files")
"""


@pytest.mark.promise("mlflow-reads-workspace-logs-runs")
def test_mlflow_client_reads_the_workspace_and_logs_runs(tmp_path: Path) -> None:
    folder, fd = make_run(tmp_path / "ws" / "runs", job=make_job(arguments=("--lr", "0.1")))
    os.close(fd)
    (tmp_path / "weights.txt").write_text("1")
    model = paceline.Model.register(paceline.Workspace(tmp_path / "ws"), "weights.txt", "digits")
    model.set_alias("best")
    # Use a separate process, because MLflow looks for stores only when it is imported.
    done = subprocess.run(
        [sys.executable, "-c", MLFLOW_CLIENT, str(tmp_path / "ws"), folder.run_id],
        env={**os.environ, "PYTHONPATH": str(Path(paceline.__file__).parent / "compat" / "shim" / "azureml_names")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_metrics_that_mlflow_logs_again_for_a_model_are_kept_once(cli: Cli) -> None:
    """`log_model` logs the run's numbers of its step again: `{'err': [0.5, 0.5]}`."""
    needs("mlflow")
    script = """
        import mlflow
        def log_model(name, **options):
            model = lambda model_input: model_input
            return mlflow.pyfunc.log_model(name=name, python_model=model, pip_requirements=[], **options)
        with mlflow.start_run():
            mlflow.log_metric("loss", 1.0, step=0)
            mlflow.log_metric("loss", 0.5, step=1)
            mlflow.log_metrics({"err": 0.5, "none": float("nan")})
            model = log_model("first")
            mlflow.log_metric("err", 0.25)
            mlflow.log_metric("acc", 0.75, model_id=model.model_id)
            log_model("second", step=1)
            mlflow.log_metric("late", 1.0, step=1)
            with mlflow.start_run(run_name="fold", nested=True) as fold:
                mlflow.log_metric("err", 2.0)
                log_model("third")
                assert mlflow.get_run(fold.info.run_id).data.metrics == {"err": 2.0}
        """
    found = {name: [value for _, value in pairs] for name, pairs in values(cli, script).items()}
    assert found.pop("none") == ["NaN"]
    assert found == {"loss": [1.0, 0.5], "err": [0.5, 0.25], "acc": [0.75], "late": [1.0], "fold/err": [2.0]}
