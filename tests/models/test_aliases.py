"""Aliases are moved in one step, with user and time, and never to a missing version."""

from __future__ import annotations

import getpass

import pytest

from paceline.errors import ModelError, ModelNotFoundError
from paceline.models import aliases, registry, resolve, sources
from tests.helpers import start_python, write_tree

MOVE = """
import sys
from pathlib import Path
from paceline.models import aliases, registry
versions = registry.versions_of(Path(sys.argv[1]))
for number in range(20):
    aliases.move(versions, "digits", "production", 1 + (number + int(sys.argv[2])) % 3)
"""


@pytest.fixture
def workspace(tmp_path):
    for number in range(3):
        registry.add(tmp_path / "ws", "digits", sources.local(write_tree(tmp_path / "made", {"a": str(number)})))
    return tmp_path / "ws"


@pytest.fixture
def versions(workspace):
    return registry.versions_of(workspace)


@pytest.mark.promise("alias-moved-one-step-change")
def test_alias_history_records_user_and_time_of_each_move(workspace, versions):
    assert aliases.move(versions, "digits", "production", 1) is None
    assert aliases.move(versions, "digits", "candidate", 3) is None
    assert aliases.move(versions, "digits", "production", 2) == 1
    assert aliases.move(versions, "digits", "production", 2) == 2, "no change, and no line"
    assert aliases.move(versions, "digits", "candidate", None) == 3
    assert aliases.current(versions, "digits") == {"production": 2}
    changes = aliases.history(versions, "digits")
    assert [(one["alias"], one["version"], one["was"]) for one in changes] == [
        ("production", 1, None),
        ("candidate", 3, None),
        ("production", 2, 1),
        ("candidate", None, 3),
    ]
    assert {one["by"] for one in changes} == {getpass.getuser()}
    assert [one["time_utc"] for one in changes] == sorted(one["time_utc"] for one in changes)
    assert len(aliases.history(versions, "digits", "candidate")) == 2
    assert resolve(workspace, "digits@production").version == 2


@pytest.mark.promise("alias-moved-one-step-change")
def test_concurrent_alias_moves_are_serialized(workspace, versions):
    started = [start_python(MOVE, workspace, number) for number in range(4)]
    assert [process.wait(timeout=180) for process in started] == [0] * 4
    for process in started:
        process.communicate()
    changes = aliases.history(versions, "digits")
    assert [one["was"] for one in changes[1:]] == [one["version"] for one in changes[:-1]]
    assert aliases.current(versions, "digits") == {"production": changes[-1]["version"]}


def test_truncated_line_of_an_alias_change_is_ignored(workspace, versions):
    aliases.move(versions, "digits", "production", 1)
    with open(workspace / "models/digits/aliases.jsonl", "a") as file:
        file.write('{"alias": "production", "ver')
    assert aliases.current(versions, "digits") == {"production": 1}
    aliases.move(versions, "digits", "production", 2)
    assert aliases.current(versions, "digits") == {"production": 2}


@pytest.mark.parametrize(
    "alias", ["", "3", "v3", "V3", "1.0", "latest", "LATEST", "a b", "a@b", "a:b", "../a", "ä", None, "x" * 65]
)
def test_model_alias_that_looks_like_a_version_or_has_invalid_characters_is_refused(versions, alias):
    with pytest.raises(ModelError, match=r"the alias .*(looks like a version|give letters)"):
        aliases.move(versions, "digits", alias, 1)


def test_alias_of_a_missing_version_is_refused(versions):
    with pytest.raises(
        ModelNotFoundError, match=r"has no version 4, so 'production' can't point at it\. It has: 1, 2, 3\."
    ):
        aliases.move(versions, "digits", "production", 4)
    with pytest.raises(ModelNotFoundError, match=r"has no alias 'production'\. It has: none\."):
        aliases.move(versions, "digits", "production", None)
