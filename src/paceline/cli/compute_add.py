"""compute add: this verb parses its own words, because its options depend on the target's kind."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from paceline.cli.common import warn
from paceline.cli.options import VerbOption, takes
from paceline.cli.verb_help import EXAMPLES
from paceline.errors import TargetError
from paceline.system.names import counted
from paceline.targets import configured
from paceline.targets.configured import Configured, kind_names, kind_options, load_errors
from paceline.targets.options import Option, help_lines, parse_words
from paceline.targets.status_of_all import TargetLook, look_at_all
from paceline.workspace import Workspace

_CHECK_S = 30.0
#: A message names at most this many nodes that are down, and the number of further nodes.
_DOWN_SHOWN = 3
_OWN = (
    Option("kind", "kind of the target", is_required=True),
    Option("replace", "change the target of this name", type=bool),
    Option("check", "look whether the target can be reached", type=bool, default=True),
    Option("help", "show this message", type=bool),
)


@takes(VerbOption("words", "", "NAME --kind KIND [OPTIONS OF THE KIND]", list))
def add(*, words: list[str]) -> int:
    """Add a compute target. `--kind KIND --help` shows the options of a kind."""
    given = ["--help" if word == "-h" else word for word in words or []]
    kind = _kind(given)
    wants_help = "--help" in given
    if not given or (wants_help and kind is None):
        print("\n".join(_general_help()))
        return 0 if wants_help else 2
    if kind is None:
        raise TargetError(f"--kind is missing. Say what the target is: --kind {'|'.join(kind_names())}.")
    options = kind_options(kind)
    if wants_help:
        print("\n".join(_help_of(kind, options)))
        return 0
    own = {option.name for option in _OWN}
    settings, alone = parse_words(kind, (*options, *_OWN), given)
    # Separate the options of `compute add` itself, such as --replace, from the target's settings.
    asked = {name: settings.pop(name) for name in own & set(settings)}
    described = Configured(name=_one_name(alone), kind=kind, settings=settings)
    workspace = Workspace.from_config()
    is_new = described.name not in configured.names(workspace.path)
    before = None if is_new else configured.read(workspace.path, described.name)
    # Store the target before the check, which finds the target by its name. If a setting is wrong, remove the target again.
    configured.add(workspace.path, described, replace=bool(asked.get("replace")))
    found = look_at_all(workspace.path, [described.name], _CHECK_S)[0] if asked.get("check", True) else None
    if found is not None and found.is_wrong:
        _take_back(workspace.path, described.name, before)
        raise TargetError(str(found.error))
    print(f"{described.name}: {_text(configured.read(workspace.path, described.name))}")
    if found is not None:
        _tell(found)
    return 0


def _take_back(workspace_dir: Path, name: str, before: Configured | None) -> None:
    if before is None:
        configured.remove(workspace_dir, name)
    else:
        configured.add(workspace_dir, before, replace=True)


def _kind(words: Sequence[str]) -> str | None:
    kind: str | None = None
    # Append an empty word: `pairwise` then also yields a pair that begins with the last word.
    for word, following in pairwise([*words, ""]):
        if word == "--":
            break
        if word == "--kind":
            kind = following or None
        elif word.startswith("--kind="):
            kind = word.partition("=")[2] or None
    return kind


def _one_name(alone: Sequence[str]) -> str:
    if len(alone) == 1:
        return alone[0]
    if not alone:
        raise TargetError("NAME is missing. Write `paceline compute add NAME --kind KIND ...`.")
    raise TargetError(
        f"one NAME is taken, and {', '.join(map(repr, alone))} stand alone. A value goes behind its option, one with spaces in "
        "quotes."
    )


def _tell(found: TargetLook) -> None:
    if found.error:
        warn(
            f"paceline: warning: {found.name} is kept, but can't be reached: {found.error} "
            f"`paceline compute doctor {found.name}` looks closer."
        )
    elif found.status is not None:
        status = found.status
        parts = [f"{len(status.up)} of {counted(len(status.nodes), 'node')} up"]
        parts += [f"{number} {what}" for number, what in ((status.cores, "cores"), (status.gpus, "GPUs")) if number]
        print(", ".join(parts), file=sys.stderr)
        down = [node for node in status.nodes if not node.is_up and node.message]
        for node in down[:_DOWN_SHOWN]:
            warn(f"paceline: warning: {node.name} is {node.state}: {node.message}")
        if len(down) > _DOWN_SHOWN:
            print(
                f"paceline: {len(down) - _DOWN_SHOWN} more are down: `paceline compute show {found.name}`.",
                file=sys.stderr,
            )


def _text(described: Configured) -> str:
    values = {key: ",".join(one) if isinstance(one, list) else one for key, one in described.settings.items()}
    return " ".join([described.kind, *(f"{key}={value}" for key, value in values.items())])


def _general_help() -> list[str]:
    return [
        "Usage: paceline compute add NAME --kind KIND [OPTIONS]",
        "",
        "  Add a compute target. Runs use it by its name: paceline run --compute NAME",
        "",
        "Example:",
        f"  {EXAMPLES['compute add']}",
        "",
        "Options:",
        *_listed(_OWN),
        "",
        f"Kinds: {', '.join(kind_names())}.",
        "Options of a kind: paceline compute add --kind KIND --help",
        *load_errors().values(),
        "",
        "More: paceline docs compute",
    ]


def _help_of(kind: str, options: Sequence[Option]) -> list[str]:
    return [
        f"Usage: paceline compute add NAME --kind {kind} [OPTIONS]",
        "",
        f"Options of kind {kind}:",
        *(_listed(options) or ["  none"]),
        "",
        "Options:",
        *_listed(_OWN[1:]),
        "",
        "More: paceline docs compute",
    ]


def _listed(options: Sequence[Option]) -> list[str]:
    lines = [(word.replace("--check", "--no-check"), text) for word, text in help_lines(options)]
    width = max((len(word) for word, _ in lines), default=0)
    return [
        f"  {word:<{width}}  {text.replace('look whether', 'do not look whether').replace(' (default: True)', '')}"
        for word, text in lines
    ]
