"""diff: how two runs differ."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from paceline.cli import completing
from paceline.cli.common import coloured, folder_of, has_colour, print_json, print_table
from paceline.cli.shared_options import Json
from paceline.reports.code import FileChange
from paceline.reports.diff import MetricChange, RunDiff, compare
from paceline.runs.visible import visible

#: So many lines of the code's diff are shown where it was not asked for.
_CODE_LINES = 60
_LONGEST = 60


def diff(
    a: Annotated[
        str,
        typer.Argument(
            help="Run: its id, the beginning of it, or its name.", metavar="A", autocompletion=completing.run_ids
        ),
    ],
    b: Annotated[str, typer.Argument(help="Another run.", metavar="B", autocompletion=completing.run_ids)],
    code: Annotated[bool, typer.Option("--code", help="All lines of the code that differ, however many.")] = False,
    as_json: Json = False,
) -> None:
    """Compare two runs: parameters, code, environment, data, topology, and the first step at which metrics differ."""
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


def _print_code(found: RunDiff, *, whole: bool) -> None:
    print("\nCode:" + (f" not compared: {found.code_note}" if found.code_note else ""))
    for file in found.code:
        print(f"  {visible(file.name)}  {file.status}{_counts(file)}")
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


def _counts(file: FileChange) -> str:
    return f"  +{file.plus} -{file.minus}" if file.text else ""


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
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
