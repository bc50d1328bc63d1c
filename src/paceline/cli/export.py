"""export, tensorboard: runs for other trackers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.common import folders_of, print_json, refuse
from paceline.cli.options import JSON, RUNS, VerbOption, takes
from paceline.errors import UserError
from paceline.runs import read, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.visible import visible
from paceline.system.names import did_you_mean
from paceline.trackers import export as exports
from paceline.trackers.board import TensorBoard

if TYPE_CHECKING:
    from paceline.cli.outputs import Exported

#: Kind of export -> what its option -o names.
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
    """Start TensorBoard on runs, with all their metrics. It follows runs that go on; Ctrl-C ends it."""
    folders = _folders(run_ids)
    names = [tags_and_properties.read(folder.notes).name or folder.run_id for folder in folders]
    # Replace names with special characters: display names are free text, but these become names of folders.
    plain = [
        name if name.replace("-", "").replace("_", "").isalnum() and names.count(name) == 1 else None for name in names
    ]
    return TensorBoard({name or folder.run_id: folder for name, folder in zip(plain, folders, strict=True)}, port).run()


def _folders(run_ids: list[str] | None) -> list[RunFolder]:
    folders = folders_of(run_ids)
    for folder in folders:
        read.record(folder)  # reading the record also refreshes the folder of a remote run
    return folders
