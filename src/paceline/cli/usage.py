"""usage: what runs have held of cores and GPUs."""

from __future__ import annotations

import datetime as dt
from typing import Annotated

import typer

from paceline.cli.common import print_json, print_table
from paceline.cli.durations import duration_option
from paceline.cli.shared_options import Json
from paceline.errors import UserError
from paceline.reports import usage as usages
from paceline.system.names import did_you_mean
from paceline.workspace import Workspace


def usage(
    by: Annotated[
        str, typer.Option("--by", metavar="KEY", help=f"One of {', '.join(usages.KEYS)}.", show_default=True)
    ] = "experiment",
    since_s: Annotated[
        float | None,
        duration_option(
            "--since", unit="d", help="Runs submitted within so long: 30d, 12h; a number alone is days. Default: all."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Sum up the core hours and GPU hours that runs used and lost."""
    if by not in usages.KEYS:
        raise UserError(f"--by {by!r}: choose one of {', '.join(usages.KEYS)}.{did_you_mean(by, usages.KEYS)}")
    since = dt.datetime.now(dt.timezone.utc) - dt.timedelta(seconds=since_s) if since_s is not None else None
    runs_dir = Workspace.from_config(create=False).runs_dir
    found = usages.summed(runs_dir, by, since=since)
    total = usages.Usage(name="all")
    for one in found:
        total = total.plus(one)
    if as_json:
        print_json({"by": by, "rows": [one.to_json() for one in found], "all": total.to_json()})
        return
    if not found:
        print(f"No runs in {runs_dir.parent} hold cores or GPUs{' since then' if since else ''}.")
        return
    header = (
        by.upper(),
        "RUNS",
        "CORE-HOURS",
        "LOST",
        "GPU-HOURS",
        "LOST",
        "FAILED",
        "CANCELED",
        "PREPARING",
        "DATA",
        "IDLE",
    )
    print_table(header, [_row(one) for one in (*found, *([total] if len(found) > 1 else []))])


def _row(one: usages.Usage) -> tuple[str, ...]:
    # Of a workspace without GPUs, shares of cores say where the time went.
    kind = "gpu" if one.gpu_hours else "core"
    held = getattr(one, f"{kind}_hours")
    shares = [_share(getattr(one, f"{why}_{kind}_hours"), held) for why in ("failed", "canceled", "preparing", "data")]
    shares.append(_share(one.idle_gpu_hours, one.gpu_hours) if one.idle_gpu_hours else "-")
    return (
        one.name,
        str(one.runs),
        _hours(one.core_hours),
        _share(one.lost_core_hours, one.core_hours),
        _hours(one.gpu_hours),
        _share(one.lost_gpu_hours, one.gpu_hours),
        *shares,
    )


def _hours(hours: float) -> str:
    return "-" if not hours else f"{hours:.1f}" if hours >= 1 else f"{hours:.2g}"


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "-"
