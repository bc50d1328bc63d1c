"""compute doctor: what is wrong with a compute target, and what to do about it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import completing
from paceline.cli.common import coloured, has_colour, print_json
from paceline.cli.durations import duration_option
from paceline.cli.shared_options import Json
from paceline.doctor.finding import FAIL, OK, SKIPPED, WARN, Finding, worst
from paceline.errors import TargetError
from paceline.runs.visible import visible
from paceline.targets import configured
from paceline.targets.kinds import load_errors
from paceline.workspace import Workspace

_COLOURS = {OK: 32, WARN: 33, FAIL: 31, SKIPPED: 2}
_CLEAR_LINE = "\r\x1b[K"


def doctor(
    name: Annotated[
        str, typer.Argument(help="The compute target; `local` is this machine.", autocompletion=completing.targets)
    ],
    nodes: Annotated[int | None, typer.Option("--nodes", min=1, metavar="N", help="Examine so many nodes.")] = None,
    python: Annotated[
        str | None, typer.Option("--python", metavar="PATH", help="Interpreter that scripts will run in.")
    ] = None,
    interface: Annotated[
        str | None, typer.Option("--interface", metavar="NAME", help="Network interface that nodes will use.")
    ] = None,
    wait_s: Annotated[
        float, duration_option("--wait", least=1, help="Wait so long for the nodes to be had; default: 3m.")
    ] = 180.0,
    as_json: Json = False,
) -> int:
    """Examine a compute target: its nodes, their environment, the network between them, an all-reduce.

    Exits with 1 if a check failed.
    """
    workspace_dir = Workspace.from_config(create=False).path
    described = configured.read(workspace_dir, name)
    found = _findings(described, workspace_dir, nodes, python, interface, wait_s)
    if as_json:
        findings = list(found)
        print_json(
            {
                "target": name,
                "kind": described.kind,
                "result": worst(findings),
                "findings": [finding.to_json() for finding in findings],
            }
        )
        return int(worst(findings) == FAIL)
    # A table needs its widest row first. A file or a pipe gets each finding as it comes, so that one that is cut off has told
    # what there was.
    findings = _print_table(found) if sys.stdout.isatty() else _print_lines(found)
    _print_result(findings)
    return int(worst(findings) == FAIL)


def _findings(
    described: configured.Configured,
    workspace_dir: Path,
    nodes: int | None,
    python: str | None,
    interface: str | None,
    wait_s: float,
) -> Iterator[Finding]:
    from paceline.doctor.doctor import examine

    # First, for a kind that could not be loaded explains why a target of it can't be made.
    for kind, message in load_errors().items():
        yield Finding(check="plug-ins", node=kind, level=WARN, seen=message)
    try:
        target: Any = described.make()
    except TargetError as error:
        again = f"`paceline compute add {described.name} --kind {described.kind} --replace ...` sets them anew."
        yield Finding(check="settings", level=FAIL, seen=str(error), advice=again)
        return
    yield Finding(check="settings", level=OK, seen=f"kind {described.kind}, {len(described.settings)} set")
    yield from examine(
        target,
        workspace_dir,
        node_count=nodes,
        python=python or described.settings.get("python"),
        interface=interface or described.settings.get("interface"),
        nodes_s=wait_s,
        say=_progress if sys.stderr.isatty() else lambda text: None,
    )


def _print_lines(findings: Iterator[Finding]) -> list[Finding]:
    """One line for each, as soon as it is found."""
    printed = []
    for finding in map(_visible, findings):
        place = f"{finding.check} on {finding.node}" if finding.node else finding.check
        advice = f" {finding.advice}" if finding.advice else ""
        print(f"{finding.level}: {place}: {_sentence(finding.seen) if advice else finding.seen}{advice}", flush=True)
        printed.append(finding)
    return printed


def _print_table(findings: Iterator[Finding]) -> list[Finding]:
    """A table; what to do stands below what was seen."""
    found = [_visible(finding) for finding in findings]
    # The table takes the place of the last line of progress.
    _progress("")
    colour = has_colour(sys.stdout)
    folded = _folded(found)
    rows = [(finding.level, finding.check, finding.node or "") for finding in folded]
    widths = [max(len(row[column]) for row in [("LEVEL", "CHECK", "NODE"), *rows]) for column in range(3)]
    header = "  ".join(word.ljust(width) for word, width in zip(("LEVEL", "CHECK", "NODE"), widths, strict=True))
    print(coloured(f"{header}  SEEN", 1, colour))
    for finding, row in zip(folded, rows, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = coloured(cells[0], _COLOURS[finding.level], colour)
        print("  ".join([*cells, finding.seen]).rstrip())
        if finding.advice:
            print(f"{'':<{sum(widths) + 6}}-> {finding.advice}")
    return found


def _visible(finding: Finding) -> Finding:
    """Make an answer safe to print: a machine may answer anything."""
    return replace(
        finding,
        node=visible(finding.node) if finding.node else finding.node,
        seen=visible(finding.seen),
        advice=visible(finding.advice) if finding.advice else finding.advice,
    )


def _folded(findings: list[Finding]) -> list[Finding]:
    """One finding for nodes of which the same is to be said, where nothing is to be done about it."""
    nodes: dict[tuple[str, str, str], list[str]] = {}
    for finding in findings:
        if finding.node and not finding.advice:
            nodes.setdefault((finding.level, finding.check, finding.seen), []).append(finding.node)
    folded = []
    for finding in findings:
        same = (
            nodes.get((finding.level, finding.check, finding.seen), []) if finding.node and not finding.advice else []
        )
        if len(same) <= 1:
            folded.append(finding)
        elif same[0] == finding.node:
            folded.append(replace(finding, node=f"{len(same)} nodes"))
    return folded


def _print_result(findings: list[Finding]) -> None:
    counts = [
        f"{number} {text}"
        for level, text in ((OK, "ok"), (WARN, "to look at"), (FAIL, "failed"), (SKIPPED, "skipped"))
        if (number := sum(finding.level == level for finding in findings))
    ]
    print(", ".join(counts), file=sys.stderr)


def _progress(text: str) -> None:
    """Show what is being looked at, in place of what was shown before."""
    if sys.stderr.isatty():
        print(f"{_CLEAR_LINE}{text}{' ...' if text else ''}", end="", file=sys.stderr, flush=True)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."
