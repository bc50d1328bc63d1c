"""export, tensorboard, relay, import: copy runs to other trackers, and from other trackers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.common import folder_of, folders_of, print_json, refuse
from paceline.cli.options import JSON, LATEST_RUN, RUNS, VerbOption, takes
from paceline.errors import UserError
from paceline.runs import read, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.visible import visible
from paceline.system.names import did_you_mean
from paceline.trackers import export as exports
from paceline.trackers.board import TensorBoard
from paceline.trackers.imports import TRACKERS
from paceline.trackers.imports import import_runs as import_store
from paceline.trackers.relay import MetricRelay, MlflowServer
from paceline.trackers.wandb_server import WandbServer
from paceline.workspace import Workspace

if TYPE_CHECKING:
    from paceline.cli.outputs import Exported

#: Kind of export -> the meaning of the option -o for this kind.
_KINDS = {"csv": "the file", "parquet": "the file", "tensorboard": "the folder", "mlflow": "the tracking URI"}


@takes(
    RUNS,
    VerbOption("--to", f"One of {', '.join(_KINDS)}.", "KIND", default="csv"),
    VerbOption(
        "-o --output",
        "File of csv (default: standard output) or parquet, folder of tensorboard, tracking URI of mlflow.",
        "PLACE",
    ),
    VerbOption("-e --experiment", "With mlflow: the experiment in MLflow; default: the run's."),
    VerbOption("--files", "With mlflow: export the runs' files, too.", type=bool),
    JSON,
)
def export(
    *, run_ids: list[str], to: str, output: str | None, experiment: str | None, files: bool, as_json: bool
) -> None:
    """Export metrics of runs to CSV, Parquet, TensorBoard or MLflow."""
    own = to != "mlflow" and (experiment is not None or files)
    if to not in _KINDS:
        raise UserError(f"--to {to!r}: choose one of {', '.join(_KINDS)}.{did_you_mean(to, _KINDS)}")
    refuse(
        UserError,
        (own, f"--experiment and --files belong to --to mlflow, not to {to}."),
        (output is None and to != "csv", f"--to {to} needs -o with {_KINDS[to]}."),
    )
    folders = _folders(run_ids)
    made: list[str] = []
    if to == "mlflow":
        made = [exports.to_mlflow(folder, str(output), experiment, files=files) for folder in folders]
    elif output is None:
        exports.to_csv(folders, sys.stdout)
        return
    else:
        made = _written(to, folders, Path(output))
    if as_json:
        found: Exported = {"to": to, "runs": [folder.run_id for folder in folders], "made": made}
        print_json(found)
    else:
        for name in made:
            print(visible(name))


def _written(to: str, folders: list[RunFolder], path: Path) -> list[str]:
    try:
        if to == "tensorboard":
            return [str(place) for place in exports.to_tensorboard(folders, path)]
        if to == "parquet":
            exports.to_parquet(folders, path)
        else:
            with open(path, "w", newline="") as file:
                exports.to_csv(folders, file)
    except OSError as error:
        raise UserError(f"-o {str(path)!r} can't be written: {error.strerror}.") from error
    return [str(path)]


@takes(RUNS, VerbOption("--port", "Port to listen at, on this machine only.", type=int, least=1, default=6006))
def tensorboard(*, run_ids: list[str], port: int) -> int:
    """Start TensorBoard on runs, with all their metrics. It follows active runs; Ctrl-C ends it."""
    folders = _folders(run_ids)
    names = [tags_and_properties.read(folder.notes).name or folder.run_id for folder in folders]
    # Name a folder after each run. If the run's name has special characters or is not unique, use the run's id instead.
    plain = [
        name if name.replace("-", "").replace("_", "").isalnum() and names.count(name) == 1 else None for name in names
    ]
    return TensorBoard({name or folder.run_id: folder for name, folder in zip(plain, folders, strict=True)}, port).run()


def _folders(run_ids: list[str] | None) -> list[RunFolder]:
    folders = folders_of(run_ids)
    for folder in folders:
        read.record(folder)  # reading the record of a remote run also fetches its files
    return folders


#: For each run, print at most this many problems.
_SHOWN = 5


@takes(
    VerbOption("tracker", f"One of {', '.join(TRACKERS)}.", "TRACKER", needed=True),
    VerbOption(
        "path",
        "The store: mlruns or mlflow.db, the folder wandb, a --logdir, a folder of Neptune's exporter, a folder with .aim.",
        "PATH",
        Path,
        needed=True,
    ),
    VerbOption("-e --experiment", "Experiment of all imported runs; default: the experiment or project in the store."),
    VerbOption("--dry-run", "Read the store and print the summary, but write nothing.", type=bool),
    JSON,
)
def import_runs(*, tracker: str, path: Path, experiment: str | None, dry_run: bool, as_json: bool) -> int:
    """Import the runs of another tracker's store. A second import adds what is new."""
    workspace = Workspace.from_config(create=not dry_run).path
    report = import_store(tracker, path, workspace=workspace, experiment=experiment, dry_run=dry_run)
    if as_json:
        print_json({"tracker": report.tracker, "counts": report.counts, "runs": list(report.runs)})
        return int("broken" in report.counts)
    for run in report.runs:
        if run["outcome"] != "unchanged" or run["problems"]:
            print(visible(f"{run['outcome']:<9} {run['run_id'] or ''} ({run['key']})"))
        for problem in run["problems"][:_SHOWN]:
            print(visible(f"          {problem}"))
    counts = ", ".join(f"{number} {outcome}" for outcome, number in report.counts.items()) or "no runs"
    print(f"{'Would import' if dry_run else 'Imported'} from {tracker}: {counts}.")
    return int("broken" in report.counts)


@takes(
    LATEST_RUN,
    VerbOption(
        "--to", "mlflow=URI: an MLflow server; wandb=ENTITY/PROJECT or wandb=PROJECT: W&B.", "PLACE", needed=True
    ),
    VerbOption("-e --experiment", "With mlflow: the experiment in MLflow; default: the run's."),
)
def relay(*, run_id: str | None, to: str, experiment: str | None) -> None:
    """Pass the metrics of a run on to MLflow or W&B. Ends with the run."""
    kind, _, place = to.partition("=")
    is_mlflow = kind == "mlflow" and place.startswith(("http://", "https://", "databricks"))
    refuse(
        UserError,
        (
            not is_mlflow and kind != "wandb",
            f"--to {to!r}: write mlflow=URI, such as mlflow=http://localhost:5000, or wandb=ENTITY/PROJECT.",
        ),
        (kind == "wandb" and experiment is not None, "--experiment belongs to mlflow. Write wandb=ENTITY/PROJECT."),
    )
    folder = folder_of(run_id)
    if is_mlflow:
        MetricRelay(folder, MlflowServer(folder, place, experiment)).run()
    else:
        server = WandbServer(folder, place)
        MetricRelay(folder, server).run()
        place = server.url
    print(visible(f"All metrics of {folder.run_id} are at {place}."))
