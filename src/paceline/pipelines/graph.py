"""The order of steps: each after all that it needs, otherwise as they were given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from paceline.errors import PipelineError

T = TypeVar("T")


def flat(steps: Any) -> list[Any]:
    """The steps of a list, in which there may be lists again."""
    found: list[Any] = []
    for one in steps:
        found += flat(one) if isinstance(one, (list, tuple)) else [one]
    return found


def ordered(steps: Sequence[T], needs: Callable[[T], Iterable[T]], name: Callable[[T], str]) -> list[T]:
    """The steps, and those that they need which were not given, each after all that it needs. name: for messages.

    Raises:
        PipelineError: some of them need each other, round in a circle; all of these are named.
    """
    done: dict[int, T] = {}
    for step in steps:
        _walk(step, needs, name, done, [])
    return list(done.values())


def _walk(
    step: T, needs: Callable[[T], Iterable[T]], name: Callable[[T], str], done: dict[int, T], above: list[T]
) -> None:
    if id(step) in done:
        return
    for number, other in enumerate(above):
        if other is step:
            names = " -> ".join(name(one) for one in (*above[number:], step))
            raise PipelineError(f"the steps need each other in a circle: {names}. Take one of these arrows out.")
    for needed in needs(step):
        _walk(needed, needs, name, done, [*above, step])
    done[id(step)] = step
