"""stacks: where the workers of a run stand, and who waits for whom."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.common import folder_of, print_json
from paceline.cli.shared_options import Json, LatestRun
from paceline.runs.stacks import take
from paceline.runs.visible import visible


def stacks(
    run_id: LatestRun = None,
    native: Annotated[
        bool,
        typer.Option("--native", help="Frames of C and C++ too, by py-spy, which stops each process for a moment."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show where each worker of a run is now: the stacks of its threads, and which ranks wait for which.

    The workers run on. Equal stacks are shown once, with their ranks.
    """
    found = take(folder_of(run_id), native=native)
    if as_json:
        print_json(found.to_json())
    else:
        print(visible(str(found), lines=True))
