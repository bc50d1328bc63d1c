from __future__ import annotations

import re

import pytest

from paceline import errors
from paceline.errors import PacelineError, RunFailedError


def own_classes() -> dict[str, type]:
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }


def drawn() -> list[tuple[int, str, str | None]]:
    """(depth, name, builtin that it also is) for each class in the drawing on top of the module."""
    found = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"    ([│├└─ ]*)(\w+Error)\b(?: \(also (\w+)\))?", line):
            found.append((len(match[1]) // 4, match[2], match[3]))
    return found


def test_the_drawing_shows_every_exception():
    assert sorted(name for _, name, _ in drawn()) == sorted(own_classes())


def test_the_drawing_shows_who_is_whose_child():
    classes, path = own_classes(), []
    for depth, name, builtin in drawn():
        del path[depth:]
        if path:
            assert classes[path[-1]] in classes[name].__bases__
        if builtin:
            assert builtin in [base.__name__ for base in classes[name].__bases__]
        path.append(name)


@pytest.mark.parametrize("name", sorted(own_classes()))
def test_every_exception_is_a_paceline_error(name):
    assert issubclass(own_classes()[name], PacelineError)


def test_a_failed_run_carries_its_report():
    assert RunFailedError("run x failed").report is None
