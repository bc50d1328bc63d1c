"""Read the events of a simulated worker from its script.

    EVENTS = [
        {"at": 0, "line": "rank {rank} of {size} on {node}"},
        {"at": 1, "every": 0.5, "until": 60, "line": "step {n}"},
        {"at": 1, "every": 1, "metric": "loss", "value": 0.25},
        {"at": 5, "stack": "train.py:41 all_reduce"},
        {"at": 61, "exit": 0},
        {"at": 30, "exit": 1, "error": "ValueError: bad batch", "ranks": [3]},
    ]

`at`, `every` and `until` are seconds since the worker's start. An event without `ranks` happens on every rank. A worker
without an `exit` runs until a signal ends it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import PacelineError

#: Name of an action in an event -> the types that the action's value may have.
_ACTIONS: Mapping[str, tuple[type, ...]] = {"line": (str,), "metric": (str,), "stack": (str,), "exit": (int,)}
_NUMBERS = ("at", "every", "until", "value")
_NAMES = (*_ACTIONS, *_NUMBERS, "error", "ranks")


class EventsError(PacelineError):
    """An error because a script has no valid list `EVENTS`."""


@dataclass(frozen=True, kw_only=True)
class WorkerEvent:
    """An event in the life of a worker.

    Attributes:
        action: "line", "metric", "stack" or "exit".
        what: The printed line, the metric's name, or the stack's "file:line function".
        value: The metric's value, or the exit code.
        every_s: Seconds between repetitions; 0 for a single event.
        error: The exception at an exit, as "Type: text".
        ranks: The ranks on which the event happens; None for all.
    """

    action: str
    what: str = ""
    value: float = 0.0
    at_s: float = 0.0
    every_s: float = 0.0
    until_s: float = float("inf")
    error: str = ""
    ranks: frozenset[int] | None = None


def read_events(text: bytes, name: str) -> tuple[WorkerEvent, ...]:
    """Return the events in a script's text, without running the script.

    name: The script's name, for error messages.

    Raises:
        EventsError: The script has no list `EVENTS`, or an event is wrong; the message says which.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise EventsError(f"the script {name!r} can't be read: {error}.") from error
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == "EVENTS" for to in node.targets):
            return _parsed(node.value, name)
    raise EventsError(
        f"the script {name!r} has no list EVENTS, which simulated workers play. Write one, such as "
        'EVENTS = [{"at": 0, "line": "rank {rank}"}, {"at": 10, "exit": 0}].'
    )


def _parsed(node: ast.expr, name: str) -> tuple[WorkerEvent, ...]:
    try:
        value = ast.literal_eval(node)
    except ValueError as error:
        raise EventsError(
            f"EVENTS of {name!r} is not made of plain values: {error}. Write it without calls."
        ) from error
    if not isinstance(value, (list, tuple)):
        raise EventsError(f"EVENTS of {name!r} is of type {type(value).__name__}. Write a list of dictionaries.")
    return tuple(_event(one, f"event {number} of {name!r}") for number, one in enumerate(value))


def _event(one: object, where: str) -> WorkerEvent:
    if not isinstance(one, dict):
        raise EventsError(f"{where} is {one!r}. Write a dictionary.")
    actions = [key for key in _ACTIONS if key in one]
    unknown = [key for key in one if key not in _NAMES]
    if unknown or len(actions) != 1:
        problem = f"has no key {unknown[0]!r}" if unknown else f"has {len(actions)} of {', '.join(_ACTIONS)}"
        raise EventsError(f"{where} {problem}. It needs exactly one action, and may have {', '.join(_NAMES[4:])}.")
    (action,) = actions
    numbers = {key: one.get(key, 0.0) for key in _NUMBERS}
    if wrong := [key for key, value in numbers.items() if not _is_number(value) or (key != "value" and value < 0)]:
        raise EventsError(f"{where}: {wrong[0]}={one[wrong[0]]!r} must be a number, and a time 0 or more.")
    if not isinstance(one[action], _ACTIONS[action]) or isinstance(one[action], bool):
        raise EventsError(f"{where}: {action}={one[action]!r} must be of type {_ACTIONS[action][0].__name__}.")
    try:
        if action == "line":
            one["line"].format(rank=0, size=1, node="", n=0)
    except (KeyError, IndexError, ValueError) as error:
        raise EventsError(
            f"{where}: line={one['line']!r} may name {{rank}}, {{size}}, {{node}} and {{n}} only."
        ) from error
    if action == "exit" and not 0 <= one["exit"] <= 255:
        raise EventsError(f"{where}: exit={one['exit']} must be 0 to 255.")
    return WorkerEvent(
        action=action,
        what=str(one[action]),
        value=float(one["exit"] if action == "exit" else numbers["value"]),
        at_s=float(numbers["at"]),
        every_s=float(numbers["every"]),
        until_s=float(numbers["until"]) if "until" in one else float("inf"),
        error=str(one.get("error", "")),
        ranks=_ranks(one.get("ranks"), where),
    )


def _ranks(given: object, where: str) -> frozenset[int] | None:
    if given is None:
        return None
    if not isinstance(given, Sequence) or not all(isinstance(rank, int) and rank >= 0 for rank in given):
        raise EventsError(f"{where}: ranks={given!r} must be a list of ranks, such as [0, 3].")
    return frozenset(given)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
