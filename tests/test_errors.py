from __future__ import annotations

import functools
import re

import pytest

from paceline import errors
from paceline.errors import PacelineError, RunFailedError
from tests.sources import SOURCE, read


def own_classes() -> dict[str, type]:
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and value.__module__ == errors.__name__
    }


@functools.cache
def all_classes() -> dict[str, tuple[str, set[str]]]:
    """The public exceptions in all source files: name -> module and names of its bases. Nothing is imported: some of the
    files need TensorFlow."""
    classes: dict[str, tuple[str, set[str]]] = {}
    for path in SOURCE.rglob("*.py"):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        for head in read(path.read_bytes()).classes:
            classes[head.name] = (module, {base.rpartition(".")[2] for base in head.bases})
    found, before = {"PacelineError"}, set[str]()
    while found != before:
        before = set(found)
        found |= {name for name, (_, bases) in classes.items() if bases & found}
    return {name: classes[name] for name in found if not name.startswith("_")}


def drawn() -> list[tuple[int, str, str | None, str]]:
    """(depth, name, builtin that it also is, module) for each class in the drawing on top of the module."""
    found = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"    ([│├└─ ]*)([A-Z]\w+)(?: \(also (\w+)\))?(?: +([\w.]+):)?", line):
            found.append((len(match[1]) // 4, match[2], match[3], match[4] or "errors"))
    return found


def test_exception_tree_in_the_errors_docstring_lists_every_exception() -> None:
    assert sorted((name, module) for _, name, _, module in drawn()) == sorted(
        (name, module) for name, (module, _) in all_classes().items()
    )


def test_exception_tree_in_the_errors_docstring_matches_the_base_classes() -> None:
    classes, path = all_classes(), list[str]()
    for depth, name, builtin, _ in drawn():
        del path[depth:]
        if path:
            assert path[-1] in classes[name][1]
        if builtin:
            assert builtin in classes[name][1]
        path.append(name)


@pytest.mark.promise("error-pacelineerror-did-answer-wrong")
def test_unreachable_errors_are_no_value_errors() -> None:
    from paceline.remote.link.messages import LinkError
    from paceline.targets.ray.client import UnreachableError
    from paceline.targets.ray.placement_group import LostError
    from paceline.targets.slurm.scheduler import AwayError

    for one in (LinkError, UnreachableError, LostError, AwayError):
        assert issubclass(one, ConnectionError)
        assert not issubclass(one, ValueError)
    error = LinkError("node-0: gone", "Connection refused", 255)
    assert (str(error), error.stderr, error.exit_code) == ("node-0: gone", "Connection refused", 255)


@pytest.mark.promise("error-pacelineerror-did-answer-wrong")
@pytest.mark.parametrize("name", sorted(own_classes()))
def test_every_exception_is_a_paceline_error(name):
    assert issubclass(own_classes()[name], PacelineError)


def test_run_failed_error_has_a_report_attribute():
    assert RunFailedError("run x failed").report is None
