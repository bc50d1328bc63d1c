"""profile: where the time of a run's workers goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.common import folder_of, print_json
from paceline.cli.shared_options import Json, LatestRun
from paceline.errors import UserError
from paceline.runs.profile import RATE, SECONDS, take
from paceline.runs.visible import visible


def profile(
    run_id: LatestRun = None,
    seconds: Annotated[float, typer.Option("--seconds", metavar="N", help="Sample for so long.")] = SECONDS,
    rate: Annotated[float, typer.Option("--rate", metavar="N", help="So many samples a second.")] = RATE,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="The file of all samples; default: RUN.speedscope.json."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Sample the stacks of a run's workers for some seconds, to see where their time goes.

    Prints the ten longest functions, by rank where ranks differ, and writes all samples to a file for https://www.speedscope.app.
    By py-spy where it is installed and allowed, else the main threads alone, by signal.
    """
    folder = folder_of(run_id)
    target = output or Path(f"{folder.run_id}.speedscope.json")
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise UserError(f"--output {str(target)!r}: name a file in a folder that exists.")
    found = take(folder, seconds=seconds, rate=rate)
    found.save(target)
    if as_json:
        print_json({**found.to_json(), "file": str(target)})
        return
    print(visible(str(found), lines=True))
    print(f"\nAll samples: {visible(str(target))}. Open it at https://www.speedscope.app; it stays in your browser.")
