"""Waits in a worker for the libraries whose trackers are listened to. Standard library alone, and little of it: this is loaded
before every script, and nothing else of the trackers is before the script imports one of these modules.
"""

from __future__ import annotations

import os
import sys

from paceline.system.lazy_import import when_loaded

# Not typing's: a worker loads this before its script.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableMapping
    from types import ModuleType

#: Names trackers whose values are kept as metrics, with commas between them; "none" for none of them. Unset: all.
VARIABLE = "PACELINE_TRACKERS"

#: Tracker -> the modules that are waited for, and the module here whose `listen` is called with each once it is loaded.
TRACKERS = {
    "tensorboard": {
        "tensorboard.summary.writer.event_file_writer": "event_writers",
        "tensorboardX.event_file_writer": "event_writers",
        "tensorflow.python.summary.writer.event_file_writer": "event_writers",
        "tensorflow.python.ops.summary_ops_v2": "tf_summary",
    },
    "wandb": {"wandb.sdk.wandb_run": "wandb_run"},
    "trackio": {"trackio.run": "wandb_run"},
    "lightning": {
        "lightning.fabric.loggers.csv_logs": "csv_loggers",
        "lightning_fabric.loggers.csv_logs": "csv_loggers",
    },
    "keras": {
        "keras.src.callbacks.csv_logger": "csv_loggers",
        "tf_keras.src.callbacks": "csv_loggers",
    },
    "transformers": {"transformers.trainer": "transformers_trainer"},
}
MLFLOW = "mlflow"
#: Modules of trackers whose values are not kept, and their names.
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
    """Listen to the trackers that this process's script may use. Called once, in a worker, before the script."""
    trackers = wanted(environ)
    for tracker in trackers:
        for module, own in TRACKERS.get(tracker, {}).items():
            when_loaded(module, lambda loaded, own=own: _listen(loaded, own))  # type: ignore[misc]
    if MLFLOW in trackers:
        _offer_store(environ)
    # Whoever has named trackers knows which are kept; of several ranks one says it.
    if VARIABLE not in environ and environ.get("PACELINE_RANK", "0") == "0":
        for module in UNHEARD:
            when_loaded(module, _say_unheard)


def _say_unheard(loaded: ModuleType) -> None:
    if hasattr(loaded, "__path__"):  # a package, no file of the user's that has this name
        print(
            f"paceline: values that are logged to {UNHEARD[loaded.__name__]} alone are not kept as metrics of the run. Log them "
            f"by paceline.Run.get_context().log(name, value) too; {VARIABLE}=none hides this line",
            file=sys.stderr,
        )


def wanted(environ: Mapping[str, str]) -> list[str]:
    """The trackers that are listened to, by the variable."""
    text = environ.get(VARIABLE)
    if text is None:
        return list(NAMES)
    names = [word for word in text.replace(" ", "").split(",") if word and word != "none"]
    for name in names:
        if name not in NAMES:
            print(f"paceline: {VARIABLE} names {name!r}; there are {', '.join(NAMES)} and none", file=sys.stderr)
    return [name for name in names if name in NAMES]


def _listen(loaded: ModuleType, own: str) -> None:
    # A library of tomorrow may be built otherwise; the script goes on as if nobody had listened.
    try:
        from importlib import import_module

        import_module(f"paceline.trackers.{own}").listen(loaded)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        print(f"paceline: values of {loaded.__name__} are not kept as metrics: {text}", file=sys.stderr)


def _offer_store(environ: MutableMapping[str, str]) -> None:
    """Let MLflow write into the run, here and in what the script starts, unless the user has named another place."""
    if environ.get("MLFLOW_TRACKING_URI") or environ.get("DATABRICKS_RUNTIME_VERSION"):
        return
    workspace = os.path.dirname(os.path.dirname(environ["PACELINE_RUN_DIR"]))
    # Characters that end a path in a URI.
    for character, code in (("%", "%25"), ("?", "%3F"), ("#", "%23"), (" ", "%20")):
        workspace = workspace.replace(character, code)
    environ["MLFLOW_TRACKING_URI"] = f"paceline://{workspace}"
    # MLflow finds the store by a distribution's metadata, which lie beside the names of azureml: that folder is on every
    # worker's path, and on that of what it starts.
