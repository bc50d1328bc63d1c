from __future__ import annotations

import pytest

from paceline.errors import TargetError
from paceline.targets import get_target, target_names


def test_this_machine_is_a_target():
    assert "local" in target_names()
    assert callable(get_target("local").start)


def test_an_unknown_target_is_refused_with_those_there_are():
    with pytest.raises(TargetError, match=r"no compute target 'moon'; there are .*local.*None picks 'local'"):
        get_target("moon")
