"""report: runs in one HTML file."""

from __future__ import annotations

from pathlib import Path

from paceline.cli.common import folders_of
from paceline.cli.options import RUNS, VerbOption, takes
from paceline.runs.visible import visible
from paceline.workspace import Workspace


@takes(
    RUNS,
    VerbOption("-o --output", "The HTML file; an existing one is replaced.", "FILE", Path, needed=True),
    VerbOption("--metric", "Only metrics with this name or pattern, such as 'val/*'; may be repeated.", "NAME", list),
    VerbOption("--anonymous", "Leave out texts that may name people, hosts, folders or projects.", type=bool),
)
def report(*, run_ids: list[str], output: Path, metric: list[str], anonymous: bool) -> None:
    """Write runs into one HTML file, which needs no server."""
    runs = [folder.run_id for folder in folders_of(run_ids)]
    Workspace.from_config(create=False).report(runs, output, metrics=metric or (), anonymous=anonymous)
    print(visible(str(output)))
