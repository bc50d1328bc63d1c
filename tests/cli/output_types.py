"""The types of the command line's JSON, and a check of values against them."""

from __future__ import annotations

import pydoc
import types
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Union

from paceline.cli import outputs

#: Commands with `--json` -> the type of their output.
TYPES = {
    "status, run, submit, rerun, sweep stop, sweep more, sweep resume": "RunSummary",
    "sweep again -d, sweep run -d, pipeline run -d": "RunSummary",
    "list": "list[ListedRun]",
    "list --group": "list[GroupRow]",
    "show": "ShownRun",
    "logs": "LogLineJson",
    "metrics": "list[RunMetrics]",
    "diff": "RunDiffJson",
    "files": "list[FileRow]",
    "download": "list[CopiedFile]",
    "compare": "paceline.reports.compare.TableJson",
    "bug-report": "paceline.reports.bug_report.BugReport",
    "export": "Exported",
    "import": "ImportedStore",
    "usage": "UsageReport",
    "usage --goodput": "list[GoodputJson]",
    "check": "StepComparison",
    "run --dry-run, submit --dry-run": "DryRun",
    "top": "RunLoad",
    "stacks": "StacksJson",
    "profile": "ProfileJson",
    "comment": "list[CommentJson]",
    "cancel": "list[CanceledRun]",
    "rm, rm --purge": "list[RemovedRun]",
    "restore": "list[DeletedRunJson] | list[str]",
    "prune, data prune": "PrunedJson",
    "prune --compute": "PrunedNodes",
    "sweep show, sweep run": "SweepDetails",
    "sweep best": "dict[str, object] | list[dict[str, object]]",
    "sweep run --dry-run": "SweepPoints",
    "pipeline show, pipeline run": "PipelineDetails",
    "pipeline run --dry-run": "PipelinePlan",
    "model register, model update": "ModelRow",
    "model list": "list[ModelRow]",
    "model list --at": "list[StoredModel]",
    "model show": "ModelDetails",
    "model diff": "ModelComparison",
    "model verify": "list[VerifiedModel]",
    "service deploy, service update, service reload, service scale, service rollback, service stop, service start": "ServiceRow",
    "service list": "list[ServiceRow]",
    "service show": "ServiceDetails",
    "service logs": "ServiceLog",
    "service keys": "ServiceKeys",
    "service delete": "DeletedService",
    "service unit": "UnitFile",
    "service bench": "list[ServiceLoad]",
    "queue": "Queues",
    "compute list": "Targets",
    "compute show": "TargetDetails",
    "compute doctor": "Diagnosis",
    "env list": "Environments",
    "env show": "ShownEnvironment",
    "env prune": "list[BuiltRow]",
    "env build": "BuiltEnvironment",
    "data list": "Stores",
    "data ls": "list[DataFile]",
    "data cache": "CacheState",
    "data freeze": "FrozenDataset",
    "data check": "CheckedDataset",
    "backup create": "CreatedBackup",
    "backup list": "list[BackupRow]",
    "backup verify": "VerifiedBackup",
    "backup restore": "RestoredBackup",
    "backup remove": "RemovedBackups",
    "schedule add": "ScheduleRow",
    "schedule list": "list[ScheduleRow]",
    "schedule show": "ScheduleDetails",
    "schedule run": "OccurrenceRow",
    "account add": "AddedAccount",
    "account list": "list[AccountRow]",
    "account log": "list[MemberChange]",
    "template list": "list[TemplateRow]",
    "template show": "TemplateDetails",
    "init, package": "WrittenFolder",
    "examples": "list[ExampleRow]",
    "examples --to": "WrittenFolder",
    "azureml check": "UsesOfAzure",
}
#: These strings stand for numbers that JSON does not have.
_NUMBERS = ("NaN", "Infinity", "-Infinity")


@cache
def documented() -> dict[tuple[str, ...], Any]:
    """Return a dict from the words of a command to its type."""
    return {tuple(command.split()): _type(kind) for commands, kind in TYPES.items() for command in commands.split(", ")}


def _type(text: str) -> Any:
    return pydoc.locate(text) if text.startswith("paceline.") else eval(text, {**vars(outputs)})


def type_of(words: Sequence[str]) -> Any:
    """Return the documented type of a command's output, or None."""
    rows = [row for row in documented() if _fits(row, words)]
    return documented()[max(rows, key=len)] if rows else None


def _fits(row: Sequence[str], words: Sequence[str]) -> bool:
    verbs = [word for word in row if not word.startswith("-")]
    return list(words[: len(verbs)]) == verbs and {*row} - {*verbs} <= {*words}


def misfits(value: object, kind: Any, place: str = "") -> Iterator[str]:
    """Yield a line for each place of a JSON value that is not of its type."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind in (object, Any):
        return
    if origin in (Union, types.UnionType):
        if all(any(True for _ in misfits(value, part)) for part in parts):
            yield f"{place}: {value!r} is no {kind}"
    elif origin is typing.Literal:
        if value not in parts:
            yield f"{place}: {value!r} is none of {parts}"
    elif typing.is_typeddict(kind):
        if not isinstance(value, dict):
            yield f"{place}: {value!r} is no object"
            return
        hints = typing.get_type_hints(kind)
        yield from (f"{place}.{name}: is not in {kind.__name__}" for name in value.keys() - hints.keys())
        yield from (f"{place}.{name}: is missing" for name in kind.__required_keys__ - value.keys())
        for name in value.keys() & hints.keys():
            yield from misfits(value[name], hints[name], f"{place}.{name}")
    elif origin in (list, dict, tuple):
        if not isinstance(value, dict if origin is dict else list):
            yield f"{place}: {value!r} is no {kind}"
            return
        items: Iterator[tuple[object, object]] = (
            iter(value.items()) if isinstance(value, dict) else enumerate(typing.cast("list[object]", value))
        )
        for number, (key, item) in enumerate(items):
            part = parts[-1] if origin is not tuple else parts[number]
            yield from misfits(item, part, f"{place}[{key!r}]")
    elif kind is float:
        if isinstance(value, bool) or not (isinstance(value, (int, float)) or value in _NUMBERS):
            yield f"{place}: {value!r} is no number"
    elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        yield f"{place}: {value!r} is no {kind.__name__}"
