"""bug-report: what to send with a fault."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.common import folder_of, print_json
from paceline.cli.shared_options import Json
from paceline.reports.bug_report import bug_report, text
from paceline.runs import read, states, store
from paceline.runs.folder import RunFolder
from paceline.runs.visible import visible
from paceline.workspace import Workspace


def report(
    run_id: Annotated[
        str | None,
        typer.Argument(help="Run: its id, the beginning of it, or its name; default: the latest that failed."),
    ] = None,
    messages: Annotated[
        bool,
        typer.Option("--messages", help="With the words of the failure, which may hold anything: read them first."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Print what to send with a bug report: versions, and where a run failed. No arguments, variables, logs, hosts or paths."""
    found = bug_report(folder_of(run_id) if run_id is not None else _latest_failed(), messages=messages)
    if as_json:
        print_json(found)
    else:
        print(visible(text(found), lines=True))


def _latest_failed() -> RunFolder | None:
    runs_dir = Workspace.from_config(create=False).runs_dir
    folders = (RunFolder(runs_dir / run_id) for run_id in store.ids(runs_dir))
    return next((folder for folder in folders if read.record(folder).status == states.FAILED), None)
