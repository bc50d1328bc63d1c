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

Install the target's package first: supervisors load the target by its entry point in the group `paceline.targets`.
docs/writing-a-target.md has an example.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.testing.bench import Bench
from paceline.testing.completing import CompletingChecks, ReadingChecks
from paceline.testing.ending import EndingChecks, FailingChecks, LosingChecks
from paceline.testing.under_test import TargetUnderTest

__all__ = ["TargetConformance", "TargetUnderTest"]


# pytest runs the checks of the last base class first, so checks of successful runs come before checks of failures.
class TargetConformance(LosingChecks, EndingChecks, FailingChecks, ReadingChecks, CompletingChecks):
    """The checks that every compute target has to pass.

    They need a module-wide fixture `under_test` that returns a `TargetUnderTest`.
    """

    @pytest.fixture
    def bench(self, under_test: TargetUnderTest) -> Iterator[Bench]:
        """Yield a `Bench` for a check. Fail if its runs leave processes behind."""
        found = Bench(under_test)
        yield found
        found.close()
