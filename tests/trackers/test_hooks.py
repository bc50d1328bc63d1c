"""What a worker waits for, with stand-ins for the libraries; the real ones are in test_libraries.py and `make proof`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from paceline.runs import metrics
from paceline.runs.context import WorkerContext
from paceline.system import lazy_import
from paceline.trackers import hooks, libraries
from paceline.trackers import sink as sinks
from paceline.trackers.sink import Sink


@pytest.fixture(autouse=True)
def to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sink:
    made = Sink(WorkerContext(tmp_path / "run", rank=0, world_size=1, attempt=1))
    monkeypatch.setattr(sinks, "_sink", made)
    monkeypatch.setattr(sinks, "_is_looked_for", True)
    # Forget names that other tests of this process have logged, and import hooks that they have set.
    monkeypatch.setattr(metrics, "logged_here", set())
    monkeypatch.setattr(sinks, "logged_here", metrics.logged_here)
    monkeypatch.setattr(
        sys, "meta_path", [each for each in sys.meta_path if type(each).__module__ != lazy_import.__name__]
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    return made


def logged(to: Sink) -> dict[str, Any]:
    return metrics.read(to.folder.metrics)


def environ(tmp_path: Path, **more: str) -> dict[str, str]:
    return {"PACELINE_RUN_DIR": str(tmp_path / "my ws" / "runs" / "r"), "PYTHONPATH": "/lib"} | more


def test_import_hook_of_a_tracker_records_values_logged_with_the_tracker_as_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: Sink, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "library_of_the_test"
    package.mkdir()
    (package / "run.py").write_text(
        "class Run:\n    step = 7\n    def log(self, data, step=None, commit=None): return 'logged'\n"
    )
    # This module has no class that Paceline knows from a version of the library.
    (package / "other.py").write_text("x = 1\n")
    waited = {
        "library_of_the_test.run": "libraries:hear_wandb",
        "library_of_the_test.other": "libraries:hear_event_writer",
    }
    monkeypatch.setattr(hooks, "TRACKERS", {"wandb": waited})
    monkeypatch.syspath_prepend(str(tmp_path))
    hooks.install(environ(tmp_path))
    from library_of_the_test import run as library

    run = library.Run()
    assert run.log({"loss": 0.5, "val": {"acc": 1}, "image": object()}) == "logged"
    run.log({"late": 2.0}, step=11)
    assert metrics.entries_by_name(to.folder.metrics)["late"][0]["step"] == 11
    assert metrics.entries_by_name(to.folder.metrics)["loss"][0]["step"] == 7
    assert logged(to) == {"loss": 0.5, "val.acc": 1, "late": 2.0}

    from library_of_the_test import other

    assert other.x == 1
    assert "values of library_of_the_test.other are not kept as metrics: AttributeError" in capsys.readouterr().err
    for name in [name for name in sys.modules if name.startswith("library_of_the_test")]:
        del sys.modules[name]


def test_mlflow_tracking_uri_is_set_unless_the_user_has_set_one(tmp_path: Path) -> None:
    found = environ(tmp_path)
    hooks.install(found)
    assert found["MLFLOW_TRACKING_URI"] == f"paceline://{tmp_path}/my%20ws"
    assert found["PYTHONPATH"] == "/lib"
    theirs = environ(tmp_path, MLFLOW_TRACKING_URI="http://mlflow.example")
    hooks.install(theirs)
    assert theirs == environ(tmp_path, MLFLOW_TRACKING_URI="http://mlflow.example")


def test_variable_paceline_trackers_selects_the_trackers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hooks, "TRACKERS", {"wandb": {"library_of_the_test.run": "libraries:hear_wandb"}})
    monkeypatch.setattr(hooks, "NAMES", ("tensorboard", "wandb", "mlflow"))
    before = len(sys.meta_path)
    found = environ(tmp_path, PACELINE_TRACKERS="none")
    hooks.install(found)
    assert "MLFLOW_TRACKING_URI" not in found
    assert len(sys.meta_path) == before
    hooks.install(environ(tmp_path, PACELINE_TRACKERS="wandb, tensorbord"))
    assert len(sys.meta_path) == before + 1
    assert "PACELINE_TRACKERS names 'tensorbord'; there are tensorboard, wandb," in capsys.readouterr().err


@pytest.mark.promise("tracker-whose-values-kept-named")
def test_import_of_an_unsupported_tracker_prints_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("library_of_the_test_a", "library_of_the_test_b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "library_of_the_test_c.py").touch()
    unheard = {f"library_of_the_test_{letter}": letter.upper() for letter in "abc"}
    monkeypatch.setattr(hooks, "UNHEARD", unheard)
    monkeypatch.syspath_prepend(str(tmp_path))
    others = ({"PACELINE_RANK": "1"}, {"PACELINE_TRACKERS": "none"}, {"PACELINE_TRACKERS": "wandb"})
    for more in others:
        hooks.install(environ(tmp_path, **more))
    import library_of_the_test_a

    assert capsys.readouterr().err == ""
    hooks.install(environ(tmp_path, PACELINE_RANK="0"))
    import library_of_the_test_b
    import library_of_the_test_c  # a file of the user

    said = capsys.readouterr().err
    assert said.startswith(
        "paceline: values that are logged to B alone are not kept as metrics of the run. Log them by "
    )
    assert said.count("\n") == 1
    for module in (library_of_the_test_a, library_of_the_test_b, library_of_the_test_c):
        del sys.modules[module.__name__]


@pytest.mark.promise("tracker-whose-values-kept-named")
def test_values_logged_with_trackio_become_metrics_with_the_step_numbers_of_trackio(to: Sink) -> None:
    class Run:
        name, _next_step = "fold", 0

        def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
            self._next_step += 1

    module = ModuleType("trackio.run")
    vars(module)["Run"] = Run
    libraries.hear_wandb(module)
    run = Run()
    run.log(metrics={"loss": 0.5}, step=None)
    run.log({"loss": 0.25, "val": {"acc": 1}})
    run.log({"late": 5}, 10)
    found = metrics.entries_by_name(to.folder.metrics)
    assert [(entry["step"], entry["value"]) for entry in found["loss"]] == [(0, 0.5), (1, 0.25)]
    assert [found[name][0]["step"] for name in ("val.acc", "late")] == [1, 10]


def test_values_of_csv_loggers_become_metrics(to: Sink) -> None:
    class Writer:
        def log_metrics(self, metrics_dict: dict[str, float], step: int | None = None) -> None:
            self.seen = metrics_dict, step

    class CSVLogger:
        def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
            self.seen = epoch

    lightning, keras = ModuleType("lightning"), ModuleType("keras")
    vars(lightning)["_ExperimentWriter"], vars(keras)["CSVLogger"] = Writer, CSVLogger
    libraries.hear_csv_logger(lightning)
    libraries.hear_csv_logger(keras)
    writer, logger = Writer(), CSVLogger()
    writer.log_metrics({"loss": 0.5}, 3)
    writer.log_metrics({"acc": 1.0})
    logger.on_epoch_end(2, {"val_loss": 0.25})
    assert writer.seen == ({"acc": 1.0}, None)
    assert logger.seen == 2
    assert logged(to) == {"loss": 0.5, "acc": 1.0, "val_loss": 0.25}


def test_metrics_from_csv_files_of_several_trainings_have_prefixes(to: Sink) -> None:
    lightning, keras = SimpleNamespace(log_dir="csv/0/version_0"), SimpleNamespace(filename="fold_0.csv")
    libraries._of_lightning(to, lightning, {"loss": 1.0})
    libraries._of_lightning(to, SimpleNamespace(log_dir="csv/1/version_0"), {"loss": 2.0})
    libraries._of_keras(to, keras, 0, {"acc": 3.0})
    libraries._of_keras(to, SimpleNamespace(filename="fold_1.csv"), 0, {"acc": 4.0})
    assert logged(to) == {"loss": 1.0, "1/loss": 2.0, "acc": 3.0, "fold_1/acc": 4.0}
