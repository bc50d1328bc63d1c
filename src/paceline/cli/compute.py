"""compute add, list, show, login, remove, doctor: the machines that runs use."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.cli.common import coloured, has_colour, print_fields, print_json, print_table, warn
from paceline.cli.compute_add import add
from paceline.cli.options import JSON, Duration, VerbOption, takes
from paceline.doctor.examination import FAIL, OK, SKIPPED, WARN, Finding, worst
from paceline.errors import TargetError
from paceline.runs import read
from paceline.runs.record import utc_now
from paceline.runs.visible import visible
from paceline.system.names import some
from paceline.targets import configured
from paceline.targets.configured import load_errors
from paceline.targets.polling import doctor_path, keep
from paceline.targets.status_of_all import TargetLook, counts_text, look, look_at_all
from paceline.workspace import Workspace

_COLOURS = {OK: 32, WARN: 33, FAIL: 31, SKIPPED: 2}
_CLEAR_LINE = "\r\x1b[K"


@takes(
    VerbOption("name", "The compute target; `local` is this machine.", complete="targets", needed=True),
    VerbOption("--nodes", "Number of nodes to examine.", "N", int, least=1),
    VerbOption("--python", "Interpreter of the scripts.", "PATH"),
    VerbOption("--interface", "Network interface of the nodes.", "NAME"),
    VerbOption(
        "--wait", "Time to wait for the nodes; default: 3m.", type=Duration(least=1), name="wait_s", default=180.0
    ),
    JSON,
)
def doctor(
    *, name: str, nodes: int | None, python: str | None, interface: str | None, wait_s: float, as_json: bool
) -> int:
    """Examine a target's nodes, environment and network. Tries an all-reduce over them.

    Exits with 1 if a check failed.
    """
    workspace_dir = Workspace.from_config(create=False).path
    described = configured.read(workspace_dir, name)
    found = _findings(described, workspace_dir, nodes, python, interface, wait_s)
    if as_json:
        findings = list(found)
        _keep(workspace_dir, name, findings)
        print_json(
            {
                "target": name,
                "kind": described.kind,
                "result": worst(findings),
                "findings": [finding.to_json() for finding in findings],
            }
        )
        return int(worst(findings) == FAIL)
    # Into a file or a pipe, print each finding at once, so that an interrupted examination leaves the findings that it has made.
    # On a terminal print a table at the end, because the widths of its columns depend on all rows.
    findings = _print_table(found) if sys.stdout.isatty() else _print_lines(found)
    _print_result(findings)
    _keep(workspace_dir, name, findings)
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

    # Report plug-ins that failed to load first: such a failure may explain why the target below can't be created.
    for kind, message in load_errors().items():
        yield Finding(check="plug-ins", node=kind, level=WARN, seen=message)
    try:
        target: Any = described.make()
    except TargetError as error:
        again = f"`paceline compute add {described.name} --kind {described.kind} --replace ...` sets them again."
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


def _keep(workspace_dir: Path, name: str, findings: list[Finding]) -> None:
    """Save the findings of a target's examination for the live page."""
    result: dict[str, object] = {
        "time_utc": utc_now(),
        "result": worst(findings),
        "findings": [each.to_json() for each in findings],
    }
    keep(doctor_path(workspace_dir, name), result)


def _print_lines(findings: Iterator[Finding]) -> list[Finding]:
    printed = []
    for finding in map(_visible, findings):
        place = f"{finding.check} on {finding.node}" if finding.node else finding.check
        advice = f" {finding.advice}" if finding.advice else ""
        print(f"{finding.level}: {place}: {_sentence(finding.seen) if advice else finding.seen}{advice}", flush=True)
        printed.append(finding)
    return printed


def _print_table(findings: Iterator[Finding]) -> list[Finding]:
    found = [_visible(finding) for finding in findings]
    # Erase the progress line, because the table takes its place.
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
    return replace(
        finding,
        node=visible(finding.node) if finding.node else finding.node,
        seen=visible(finding.seen),
        advice=visible(finding.advice) if finding.advice else finding.advice,
    )


def _folded(findings: list[Finding]) -> list[Finding]:
    """Merge equal findings of several nodes, unless they need action."""
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
    if sys.stderr.isatty():
        print(f"{_CLEAR_LINE}{text}{' ...' if text else ''}", end="", file=sys.stderr, flush=True)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


#: When a user removes a target, the message names at most this many runs that use it, and the number of further runs.
_RUNS_SHOWN = 3


NAME = VerbOption("name", "The compute target.", complete="targets", needed=True)


def _timeout(default_s: float) -> VerbOption:
    kind = Duration(least=0.1)
    return VerbOption("--timeout", "Time to wait for an answer.", type=kind, name="timeout_s", default=default_s)


@takes(_timeout(15.0), JSON)
def list_targets(*, timeout_s: float, as_json: bool) -> None:
    """List the compute targets with their free cores and GPUs."""
    workspace_dir = Workspace.from_config(create=False).path
    looks = look_at_all(workspace_dir, configured.names(workspace_dir), timeout_s)
    broken = load_errors()
    if as_json:
        print_json({"targets": [found.to_json(with_nodes=False) for found in looks], "load_errors": broken})
        return
    print_table(("TARGET", "KIND", "STATE", "NODES", "CORES FREE", "GPUS FREE", "QUEUED"), map(_row, looks))
    for found in looks:
        if found.error:
            warn(f"paceline: {found.name}: {found.error}")
    for message in broken.values():
        warn(f"paceline: {message}")


@takes(NAME, _timeout(30.0), JSON)
def show(*, name: str, timeout_s: float, as_json: bool) -> None:
    """Show a compute target's settings, nodes and queue."""
    found = look(Workspace.from_config(create=False).path, name, timeout_s)
    if as_json:
        print_json(found.to_json())
        return
    lines = [("Target", found.name), ("Kind", found.kind or "?"), ("State", found.state)]
    lines += [(f"  {key}", _setting_text(value)) for key, value in found.settings.items()]
    status = found.status
    if status is not None:
        jobs = [f"{number} {word}" for number, word in ((status.running, "running"), (status.queued, "waiting"))
                if number is not None]  # fmt: skip
        lines += [("Jobs", ", ".join(jobs)), ("", status.message)]
    print_fields(lines, width=max(12, *(len(key) + 1 for key, _ in lines)) + 1)
    if status is not None and status.nodes:
        print()
        print_table(
            ("NODE", "STATE", "CORES FREE", "GPUS FREE", ""),
            [
                (
                    node.name,
                    node.state,
                    counts_text(node.cores, node.used_cores),
                    counts_text(node.gpus, node.used_gpus),
                    node.message,
                )
                for node in status.nodes
            ],
        )
    if status is not None and status.jobs:
        print()
        print_table(
            ("RUN", "USER", "NODE", "CORES", "GPUS", "WAITS FOR"),
            [
                (job.run_id, job.user, job.node, str(job.cores or "-"), job.gpus or "-", job.reason)
                for job in status.jobs
            ],
        )
    if found.error:
        warn(f"paceline: {found.name}: {found.error}")


@takes(NAME)
def login(*, name: str) -> None:
    """Log in to a target that asks for a password or a second factor. Later commands use the connection."""
    described = configured.read(Workspace.from_config(create=False).path, name)
    target: Any = described.make()
    if not hasattr(target, "login"):
        raise TargetError(f"compute target {name!r} is of kind {described.kind!r}, which needs no login of this sort.")
    if not sys.stdin.isatty():
        raise TargetError(f"compute target {name!r}: a login needs a person at a terminal. Call it from one.")
    target.login()


@takes(NAME, VerbOption("--force", "Remove the target even if living runs use it.", type=bool))
def remove(*, name: str, force: bool) -> None:
    """Remove a compute target. Its runs go on with their copy of the settings."""
    workspace = Workspace.from_config(create=False)
    # Don't search for runs on the first target, `local`. Most runs use it, and its removal is refused below in any case.
    if not force and name in configured.names(workspace.path)[1:]:
        using = [
            record.run_id
            for record in read.all_records(workspace.runs_dir)
            if record.target == name and not record.is_terminal
        ]
        if using:
            raise TargetError(
                f"compute target {name!r} is used by {some(using, _RUNS_SHOWN)}. Cancel or wait for them, or give --force: "
                "they go on with the copy of its settings that they have."
            )
    configured.remove(workspace.path, name)
    print(f"{name} was removed from this workspace's compute targets.")


def _row(found: TargetLook) -> tuple[str, ...]:
    status = found.status
    if status is None:
        return (found.name, found.kind or "?", found.state, "", "", "", "")
    nodes = (
        f"{len(status.up)} of {len(status.nodes)}" if len(status.up) != len(status.nodes) else str(len(status.nodes))
    )
    return (
        found.name,
        found.kind or "?",
        found.state,
        nodes,
        counts_text(status.cores, status.used_cores),
        counts_text(status.gpus, status.used_gpus),
        "" if status.queued is None else str(status.queued),
    )


def _setting_text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


#: Verbs that parse their words without click's parser, because the options of `add` depend on the target's kind.
raw = ("add",)
verbs = {"add": add, "list": list_targets, "show": show, "login": login, "remove": remove, "doctor": doctor}
