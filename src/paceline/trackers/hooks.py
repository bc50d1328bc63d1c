"""Import hooks in a worker for the libraries whose trackers Paceline supports.

Every worker loads this module before the script, so it uses only the standard library. The other modules of this package are
loaded when the script imports a tracker's library.
"""

from __future__ import annotations

import os
import sys

from paceline.system.lazy_import import when_loaded

# Don't import TYPE_CHECKING from typing, because importing typing would slow the start of every worker.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping
    from types import ModuleType

#: Variable with the trackers whose values become metrics, separated by commas, or "none". Default: all trackers.
VARIABLE = "PACELINE_TRACKERS"

#: Tracker -> {the tracker's module: `module:function` of Paceline to call after a script has imported the tracker's module}.
TRACKERS = {
    "tensorboard": {
        "tensorboard.summary.writer.event_file_writer": "libraries:hear_event_writer",
        "tensorboardX.event_file_writer": "libraries:hear_event_writer",
        "tensorflow.python.summary.writer.event_file_writer": "libraries:hear_event_writer",
        "tensorflow.python.ops.summary_ops_v2": "event_followers:hear_tensorflow",
    },
    "wandb": {"wandb.sdk.wandb_run": "libraries:hear_wandb"},
    "trackio": {"trackio.run": "libraries:hear_wandb"},
    "lightning": {
        "lightning.fabric.loggers.csv_logs": "libraries:hear_csv_logger",
        "lightning_fabric.loggers.csv_logs": "libraries:hear_csv_logger",
    },
    "keras": {
        "keras.src.callbacks.csv_logger": "libraries:hear_csv_logger",
        "tf_keras.src.callbacks": "libraries:hear_csv_logger",
    },
    "transformers": {"transformers.trainer": "transformers_trainer:listen"},
}
MLFLOW = "mlflow"
#: Unsupported trackers: name of the Python package -> name of the tracker.
UNHEARD = {
    "aim": "Aim",
    "clearml": "ClearML",
    "comet_ml": "Comet",
    "neptune": "Neptune",
    "neptune_scale": "Neptune",
    "swanlab": "SwanLab",
}
NAMES = (*TRACKERS, MLFLOW)


def install(environ: MutableMapping[str, str] = os.environ) -> None:
    """Install the hooks of all trackers that the user has selected, before the script."""
    trackers = wanted(environ)
    for tracker in trackers:
        for module, own in TRACKERS.get(tracker, {}).items():
            when_loaded(module, lambda loaded, own=own: _listen(loaded, own))  # type: ignore[misc]
    if MLFLOW in trackers:
        _offer_store(environ)
    # Print a warning about unsupported trackers, but only on rank 0, and only if the user has not chosen trackers.
    if VARIABLE not in environ and environ.get("PACELINE_RANK", "0") == "0":
        for module in UNHEARD:
            when_loaded(module, _say_unheard)


def _say_unheard(loaded: ModuleType) -> None:
    if hasattr(loaded, "__path__"):  # a package is the tracker; a single file is the user's own module
        print(
            f"paceline: values that are logged to {UNHEARD[loaded.__name__]} alone are not kept as metrics of the run. Log them "
            f"by paceline.Run.get_context().log(name, value) too; {VARIABLE}=none hides this line",
            file=sys.stderr,
        )


def wanted(environ: Mapping[str, str]) -> list[str]:
    """Return the trackers that the environment selects, by default all."""
    text = environ.get(VARIABLE)
    if text is None:
        return list(NAMES)
    names = [word for word in text.replace(" ", "").split(",") if word and word != "none"]
    for name in names:
        if name not in NAMES:
            print(f"paceline: {VARIABLE} names {name!r}; there are {', '.join(NAMES)} and none", file=sys.stderr)
    return [name for name in names if name in NAMES]


def _listen(loaded: ModuleType, own: str) -> None:
    # An error in this function must not end the script. For example, a later version of the tracker's library may differ.
    try:
        from importlib import import_module

        module, _, function = own.partition(":")
        getattr(import_module(f"paceline.trackers.{module}"), function)(loaded)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        print(f"paceline: values of {loaded.__name__} are not kept as metrics: {text}", file=sys.stderr)


def _offer_store(environ: MutableMapping[str, str]) -> None:
    """Set MLflow's tracking URI to the run's workspace, unless the user set one."""
    if environ.get("MLFLOW_TRACKING_URI") or environ.get("DATABRICKS_RUNTIME_VERSION"):
        return
    workspace = os.path.dirname(os.path.dirname(environ["PACELINE_RUN_DIR"]))
    # Replace characters that would end the path in a URI.
    for character, code in (("%", "%25"), ("?", "%3F"), ("#", "%23"), (" ", "%20")):
        workspace = workspace.replace(character, code)
    environ["MLFLOW_TRACKING_URI"] = f"paceline://{workspace}"
    # MLflow finds Paceline's store by the metadata of a distribution in the folder that has Paceline's `azureml`. That folder is
    # on the module search path of every worker and of its child processes.
