"""This machine passes the suite that Paceline ships."""

from __future__ import annotations

import pytest

from paceline.testing.targets import TargetConformance
from tests.engines.conformance import Local


class TestLocal(TargetConformance):
    @pytest.fixture
    def under_test(self, local: Local, any_mpirun: str, monkeypatch: pytest.MonkeyPatch) -> Local:
        monkeypatch.setenv("PACELINE_GPUS", "")
        return local
