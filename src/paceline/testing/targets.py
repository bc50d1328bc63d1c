"""The conformance suite of compute targets, for Paceline's own and for plugins.

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


# pytest starts with the last base: check success before failure.
class TargetConformance(LosingChecks, EndingChecks, FailingChecks, ReadingChecks, CompletingChecks):
    """The checks of every compute target.

    They need a fixture `under_test`: a `TargetUnderTest` that lives for all checks.
    """

    @pytest.fixture
    def bench(self, under_test: TargetUnderTest) -> Iterator[Bench]:
        """Yield the bench of a check. At its end no process may be left on any node."""
        found = Bench(under_test)
        yield found
        found.close()
