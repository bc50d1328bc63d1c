"""logs: what the workers print."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.common import complete_run_id, folder_of
from paceline.cli.view import RunView
from paceline.errors import UserError
from paceline.runs import store
from paceline.runs.folder import RunFolder
from paceline.runs.follow import Show
from paceline.runs.logs import AttemptLog, Line
from paceline.runs.record import RunRecord

RunId = Annotated[
    str | None,
    typer.Argument(help="Run, or the beginning of its id; default: the latest.", autocompletion=complete_run_id),
]


def add_to(app: typer.Typer) -> None:
    app.command("logs")(logs)


def logs(
    run_id: RunId = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the run ends.")] = False,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="Of this worker alone, to the byte unless followed.")
    ] = None,
    attempt: Annotated[
        int | None, typer.Option("--attempt", min=1, help="Of this attempt alone; default: all.")
    ] = None,
    driver: Annotated[bool, typer.Option("--driver", help="What the supervisor and mpirun say instead.")] = False,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="What was installed and fetched before, and stored after, instead.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line: attempt, rank, text.")] = False,
) -> int:
    """What a run's workers print, from the start, in the order it was written; of several workers with the rank in front."""
    if follow and attempt is not None:
        raise UserError(f"--follow shows all attempts; leave out --attempt {attempt}, or --follow.")
    folder = folder_of(run_id)
    record = store.read(folder)
    size = record.job.world_size if record.job else 1
    if rank is not None and rank >= size:
        raise UserError(f"--rank {rank}: run {record.run_id} has ranks 0 to {size - 1}.")
    if driver:
        return _copy(folder.driver_log)
    if prepare:
        nodes = record.job.node_count if record.job else 1
        return max([_copy(folder.prepare_log(node_rank)) for node_rank in range(nodes)], default=0)
    if attempt is not None and attempt > max(1, len(record.attempts)):
        raise UserError(f"--attempt {attempt}: run {record.run_id} has {len(record.attempts)} so far.")
    attempts = [attempt] if attempt else list(range(1, len(record.attempts) + 1))
    if rank is not None and not follow and not as_json:
        return max([_copy(folder.rank_log(number, rank)) for number in attempts], default=0)
    view = RunView(1 if rank is not None else size, quiet=True, attempts=len(record.attempts))
    line = _print_json_line if as_json else view.line
    ranks = [rank] if rank is not None else list(range(size))
    if follow:
        Show(folder, line=line, state=_nothing, ranks=ranks).to_the_end()
    else:
        for number in attempts:
            _print_attempt(folder, number, ranks, line)
    return 0


def _print_attempt(folder: RunFolder, number: int, ranks: list[int], line: Callable[[Line], None]) -> None:
    log = AttemptLog(folder, number, ranks)
    try:
        for found in log.end():
            line(found)
    finally:
        log.close()


def _copy(path: Path) -> int:
    """A log as it was written, byte for byte."""
    sys.stdout.flush()
    try:
        with open(path, "rb") as file:
            shutil.copyfileobj(file, sys.stdout.buffer, 1 << 20)
    except FileNotFoundError:
        pass
    sys.stdout.flush()
    return 0


def _print_json_line(line: Line) -> None:
    print(json.dumps({"attempt": line.attempt, "rank": line.rank, "text": line.text}), flush=True)


def _nothing(record: RunRecord) -> None:
    pass
