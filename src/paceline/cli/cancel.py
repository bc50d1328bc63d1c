"""cancel: end runs."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Annotated

import typer

from paceline.cli import completing
from paceline.cli.common import folder_of, print_json
from paceline.cli.shared_options import Json
from paceline.cli.summary import summary
from paceline.errors import EngineError, TargetError
from paceline.runs import read, remote_status, states
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, user_name


def cancel(
    run_ids: Annotated[
        list[str], typer.Argument(help="Runs, or the beginnings of their ids.", autocompletion=completing.run_ids)
    ],
    wait: Annotated[bool, typer.Option("--wait", help="Return only when they have ended.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write down as Canceled those whose engine can't be asked any more.")
    ] = False,
    as_json: Json = False,
) -> None:
    """End runs: SIGTERM to their workers, after the grace period SIGKILL. A run that has ended stays as it is."""
    folders = [folder_of(run_id) for run_id in run_ids]
    for folder in folders:
        record = read.record(folder)
        if record.is_terminal:
            print(f"{folder.run_id} is {record.status} already.", file=sys.stderr)
        elif force and record.status == states.NOT_RESPONDING:
            with contextlib.suppress(EngineError, TargetError):  # it can't be told either
                read.request_cancel(folder, by=user_name())
            remote_status.write_off(folder, by=user_name())
            if not as_json:
                print(
                    f"{folder.run_id}: written off as Canceled; what of it still runs ends when its supervisor sees that"
                )
        else:
            _request(folder, record)
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


def _request(folder: RunFolder, record: RunRecord) -> None:
    try:
        read.request_cancel(folder, by=user_name())
    except (EngineError, TargetError) as error:
        if record.status != states.NOT_RESPONDING:
            raise
        hint = f"If it is gone for good: paceline cancel --force {folder.run_id}"
        raise type(error)(f"{str(error).rstrip('.')}. {hint}") from error
