"""What a target may do beyond the least: seven parts, each whole or not there."""

from __future__ import annotations

import inspect

import pytest

from paceline.targets.base import PARTS, Alike, Cleared, Controlling, EarlyStart, Elastic, Examined, Queued
from paceline.targets.configured import OWN, kind_class
from paceline.testing.ending import missing_members
from tests.targets.toy import ToyTarget

#: Kind of target -> optional protocols that it implements.
HAS = {
    "local": {EarlyStart, Elastic, Examined},
    "ssh": {EarlyStart, Elastic, Examined},
    "slurm": {Queued, Alike, Controlling, Elastic, Examined},
    "ray": {Queued, Controlling, Elastic, Examined},
    "kubernetes": {Queued, Alike, Elastic, Examined, Cleared},
    "sim": set(),
}


def bare(kind: type) -> object:
    """Return a target without settings."""
    return object.__new__(kind)


@pytest.mark.parametrize("kind", OWN)
def test_each_target_kind_implements_its_protocols(kind: str) -> None:
    target = bare(kind_class(kind))
    assert {part for part in PARTS if isinstance(target, part)} == HAS[kind]
    assert missing_members(target) == {}
    for part in HAS[kind]:
        for name in (name for name in vars(part) if not name.startswith("_")):
            wanted, found = (list(inspect.signature(getattr(owner, name)).parameters) for owner in (part, type(target)))
            assert found[: len(wanted)] == wanted, f"{kind}.{name}"


def test_protocol_methods_that_a_target_lacks_are_listed_and_isinstance_returns_false() -> None:
    class Half(ToyTarget):
        def look(self, folder, record):
            return None

        def script(self, job):
            return None

    assert missing_members(bare(Half)) == {"Queued": ["cancel", "channel"]}
    assert not isinstance(bare(Half), Queued)
    assert isinstance(bare(Half), Examined)
