from __future__ import annotations

from collections.abc import Iterator

import pytest

from paceline.functions import submission
from paceline.targets import supervisors


@pytest.fixture(autouse=True)
def _no_supervisor_ahead() -> Iterator[None]:
    """End a supervisor that a test's program has loaded for its next run."""
    submission._submitted = 0
    yield
    supervisors.drop_ahead()
