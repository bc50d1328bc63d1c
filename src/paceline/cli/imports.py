"""import: runs out of other trackers."""

from __future__ import annotations

from pathlib import Path

from paceline.cli.common import print_json
from paceline.cli.options import JSON, VerbOption, takes
from paceline.runs.visible import visible
from paceline.trackers.imports import TRACKERS
from paceline.trackers.imports import import_runs as import_store
from paceline.workspace import Workspace

#: Most problems to print for one run.
_SHOWN = 5


@takes(
    VerbOption("tracker", f"One of {', '.join(TRACKERS)}.", "TRACKER", needed=True),
    VerbOption(
        "path",
        "The store: mlruns or mlflow.db, the folder wandb, a --logdir, or a folder of Neptune's exporter.",
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
