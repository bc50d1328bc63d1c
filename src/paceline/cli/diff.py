"""diff, compare, usage, bug-report: compare runs, sum up what runs used, and describe a failure."""

from __future__ import annotations

import csv
import datetime as dt
import json
import sys
from collections.abc import Sequence
from typing import Any

from paceline.cli.common import coloured, folder_of, folders_of, has_colour, print_json, print_table, refuse
from paceline.cli.metrics import run_titles
from paceline.cli.options import JSON, NAMED_RUNS, Duration, VerbOption, takes
from paceline.errors import UserError
from paceline.reports import usage as usages
from paceline.reports.bug_report import bug_report, text
from paceline.reports.compare import KINDS, PARTS, RunTable, run_table, text_of
from paceline.reports.diff import MetricChange, RunDiff, compare
from paceline.runs import read, states, store
from paceline.runs.folder import RunFolder
from paceline.runs.visible import visible
from paceline.system.names import did_you_mean
from paceline.system.units import value_text
from paceline.workspace import Workspace

#: Without --code, show at most this many lines of the code's diff.
_CODE_LINES = 60
_LONGEST = 60


@takes(
    VerbOption("a", "Run: its id, the beginning of it, or its name.", "A", complete="run_ids", needed=True),
    VerbOption("b", "Another run.", "B", complete="run_ids", needed=True),
    VerbOption("--code", "Show all lines of code that differ.", type=bool),
    JSON,
)
def diff(*, a: str, b: str, code: bool, as_json: bool) -> None:
    """Compare two runs: parameters, code, packages, data, metrics.

    Shows the first step at which metrics differ.
    """
    found = compare(folder_of(a), folder_of(b))
    if as_json:
        print_json(found.to_json())
        return
    print(f"A  {found.a}\nB  {found.b}")
    sections = {
        "Parameters": found.parameters,
        "Settings": found.settings,
        "Git": found.git,
        "Environment": found.environment,
        "Data": found.data,
        "Topology": found.topology,
    }
    same = [title for title, changes in sections.items() if not changes]
    for title, changes in sections.items():
        if changes:
            print(f"\n{title}:")
            print_table(("", "A", "B"), [(f"  {one.name}", _text(one.a), _text(one.b)) for one in changes])
    if found.code or found.code_note:
        _print_code(found, whole=code)
    else:
        same.append("Code")
    if found.metrics:
        _print_metrics(found.metrics)
    if found.same_metrics:
        same.append(f"{len(found.same_metrics)} metrics" if len(found.same_metrics) > 1 else "1 metric")
    if same:
        print(f"\nThe same: {', '.join(same).lower()}")


@takes(
    NAMED_RUNS,
    VerbOption("--all", "Also facts that all runs share.", type=bool, name="whole"),
    VerbOption("--value", f"Of each metric: {', '.join(PARTS)}, or all. Default: last.", "VALUE", default="last"),
    VerbOption("--csv", "Print CSV.", type=bool, name="as_csv"),
    JSON,
)
def compare_runs(*, run_ids: list[str], whole: bool, value: str, as_csv: bool, as_json: bool) -> None:
    """Show any number of runs in one table, with what differs first."""
    refuse(UserError, (as_csv and as_json, "--csv and --json: choose one of them."))
    if value not in (*PARTS, "all"):
        raise UserError(f"--value {value!r}: choose one of {', '.join(PARTS)}, all.{did_you_mean(value, PARTS)}")
    folders = folders_of(run_ids)
    found = run_table(folders)
    found = found if whole or len(folders) == 1 else found.differences()
    facts = [fact for fact in found.facts if value == "all" or fact.part in ("", value)]
    if as_json:
        print_json(RunTable(runs=found.runs, facts=tuple(facts)).to_json())
        return
    if as_csv:
        # End lines with \n instead of csv's \r\n, because many tools read the \r as a part of the last field.
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(("kind", "name", "value", *found.runs))
        writer.writerows((fact.kind, fact.name, fact.part, *map(text_of, fact.values)) for fact in facts)
        return
    if not facts:
        print("These runs do not differ. --all shows what they share.")
    titles = run_titles(folders)
    for kind, title in KINDS.items():
        rows = [
            (f"  {fact.title}", *(_clipped(value_text(value)) for value in fact.values))
            for fact in facts
            if fact.kind == kind
        ]
        if rows:
            print(f"{title}:")
            print_table(("", *titles), rows)


def _print_code(found: RunDiff, *, whole: bool) -> None:
    print("\nCode:" + (f" not compared: {found.code_note}" if found.code_note else ""))
    for file in found.code:
        counts = f"  +{file.plus} -{file.minus}" if file.text else ""
        print(f"  {visible(file.name)}  {file.status}{counts}")
    lines = [line for file in found.code for line in file.text]
    shown = lines if whole else lines[:_CODE_LINES]
    colour = has_colour(sys.stdout)
    if shown:
        print()
    for line in shown:
        code = 32 if line.startswith("+") else 31 if line.startswith("-") else 36 if line.startswith("@@") else None
        print(coloured(visible(line), code, colour))
    if len(shown) < len(lines):
        print(f"... {len(lines) - len(shown)} lines more (--code)")


def _print_metrics(metrics: Sequence[MetricChange]) -> None:
    print("\nMetrics:")
    rows = []
    for one in metrics:
        place = "-" if one.step is None else f"{'step' if one.by_step else 'value'} {one.step}"
        counts = str(one.count_a) if one.count_a == one.count_b else f"{one.count_a} | {one.count_b}"
        rows.append((f"  {one.name}", place, _text(one.a), _text(one.b), _text(one.last_a), _text(one.last_b), counts))
    print_table(("", "PARTS AT", "A", "B", "LAST A", "LAST B", "VALUES"), rows)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return _clipped(value if isinstance(value, str) else json.dumps(value))


def _clipped(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


@takes(
    VerbOption(
        "run_ids", "With --goodput, runs; default: the latest.", "[RUN]...", type=list, default=(), complete="run_ids"
    ),
    VerbOption("--goodput", "Divide the time of runs into classes, such as computing and queue.", type=bool),
    VerbOption("--by", f"One of {', '.join(usages.KEYS)}.", "KEY", default="experiment"),
    VerbOption(
        "--since",
        "Only runs submitted within this time: 30d, 12h; a number alone is days. Default: all.",
        type=Duration(unit="d"),
        name="since_s",
    ),
    JSON,
)
def usage(*, run_ids: list[str], goodput: bool, by: str, since_s: float | None, as_json: bool) -> None:
    """Sum up the core hours and GPU hours that runs used and lost."""
    if run_ids and not goodput:
        raise UserError(
            f"{run_ids[0]!r}: without --goodput, `paceline usage` sums up all runs. Add --goodput, or leave it out."
        )
    if goodput:
        _print_goodput(run_ids, as_json=as_json)
        return
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


def _print_goodput(run_ids: Sequence[str], *, as_json: bool) -> None:
    from paceline.observe import goodput as goodputs

    found = []
    for folder in folders_of(run_ids):
        record = read.record(folder)
        if record.sweep is not None or record.pipeline is not None:
            raise UserError(f"run {record.run_id} holds no cores, only its child runs do. Give their ids.")
        found.append(goodputs.goodput(folder, record))
    if as_json:
        print_json([one.to_json() for one in found])
        return
    for one in found:
        print(f"{one.run_id}  {one.summary}\n")
        rows = [
            (name, _hours(one.core_s[name] / 3600), _hours(one.gpu_s[name] / 3600), f"{percent:.1f} %")
            for name, percent in one.percent.items()
            if one.core_s[name] or one.gpu_s[name]
        ]
        print_table(("CLASS", "CORE-HOURS", "GPU-HOURS", "SHARE"), rows)


def _row(one: usages.Usage) -> tuple[str, ...]:
    # Compute the shares from GPU hours. If no run used a GPU, compute them from core hours.
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


@takes(
    VerbOption("run_id", "Run: its id, the beginning of it, or its name; default: the latest that failed."),
    VerbOption("--messages", "Include the failure's text, which may hold anything: read it first.", type=bool),
    JSON,
)
def report(*, run_id: str | None, messages: bool, as_json: bool) -> None:
    """Print the facts for a bug report. They contain no arguments, variables, logs, hosts or paths."""
    found = bug_report(folder_of(run_id) if run_id is not None else _latest_failed(), messages=messages)
    if as_json:
        print_json(found)
    else:
        print(visible(text(found), lines=True))


def _latest_failed() -> RunFolder | None:
    runs_dir = Workspace.from_config(create=False).runs_dir
    folders = (RunFolder(runs_dir / run_id) for run_id in store.ids(runs_dir))
    return next((folder for folder in folders if read.record(folder).status == states.FAILED), None)
