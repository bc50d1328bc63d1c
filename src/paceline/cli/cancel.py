"""cancel: end runs."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from paceline.cli import completing
from paceline.cli.common import folder_of, print_json
from paceline.cli.shared_options import Json
from paceline.cli.summary import summary
from paceline.runs import read
from paceline.runs.record import user_name


def cancel(
    run_ids: Annotated[
        list[str], typer.Argument(help="Runs, or the beginnings of their ids.", autocompletion=completing.run_ids)
    ],
    wait: Annotated[bool, typer.Option("--wait", help="Return only when they have ended.")] = False,
    as_json: Json = False,
) -> None:
    """End runs: SIGTERM to their workers, after the grace period SIGKILL. A run that has ended stays as it is."""
    folders = [folder_of(run_id) for run_id in run_ids]
    for folder in folders:
        record = read.record(folder)
        if record.is_terminal:
            print(f"{folder.run_id} is {record.status} already.", file=sys.stderr)
        else:
            read.request_cancel(folder, by=user_name())
            if not as_json:
                print(f"{folder.run_id}: cancel requested")
    # Each look also writes the end of a run whose supervisor was killed, so there is something to wait for.
    while wait and not all(read.record(folder).is_terminal for folder in folders):
        time.sleep(0.05)
    if wait and not as_json:
        for folder in folders:
            print(f"{folder.run_id}: {read.record(folder).status}")
    if as_json:
        print_json([{key: found[key] for key in ("run_id", "status")} for found in map(summary, folders)])
