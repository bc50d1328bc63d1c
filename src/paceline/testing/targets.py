"""The conformance suite of compute targets, which Paceline's own pass. For authors of others:

    # test_my_target.py
    import pytest
    from paceline.testing.targets import TargetConformance, TargetUnderTest

    class Mine(TargetUnderTest):
        kind = "mine"
        settings = {"hosts": ["a", "b"]}

    @pytest.fixture(scope="module")
    def under_test(tmp_path_factory):
        return Mine(tmp_path_factory.mktemp("mine"))

    class TestMine(TargetConformance):
        pass

The target has to be installed, as an entry point of the group `paceline.targets`: supervisors load it by its kind.
docs/writing-a-target.md builds one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.testing.bench import Bench
from paceline.testing.completing import CompletingChecks, ReadingChecks
from paceline.testing.ending import EndingChecks, FailingChecks, LosingChecks
from paceline.testing.under_test import TargetUnderTest

__all__ = ["TargetConformance", "TargetUnderTest"]


# pytest goes through the last base first: what works should be known before what goes wrong.
class TargetConformance(LosingChecks, EndingChecks, FailingChecks, ReadingChecks, CompletingChecks):
    """What every compute target has to do. Needs a fixture `under_test`, a `TargetUnderTest` that lives for all checks."""

    @pytest.fixture
    def bench(self, under_test: TargetUnderTest) -> Iterator[Bench]:
        """Where a check submits its runs. In the end nothing may be left of them, on any node."""
        found = Bench(under_test)
        yield found
        found.close()
