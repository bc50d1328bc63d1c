"""Options and arguments that several verbs have, for their signatures."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli import completing

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Runs = Annotated[
    list[str] | None,
    typer.Argument(
        help="Runs: their ids, the beginnings of these, or their names; default: the latest.",
        metavar="[RUN]...",
        autocompletion=completing.run_ids,
    ),
]
LatestRun = Annotated[
    str | None,
    typer.Argument(
        help="Run: its id, the beginning of it, or its name; default: the latest.", autocompletion=completing.run_ids
    ),
]
