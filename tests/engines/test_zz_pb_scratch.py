import os, sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
import pytest
from paceline.testing.targets import TargetConformance, TargetUnderTest
from paceline.runs.run import Run
from tests.engines import slurm_lab
from tests.engines.slurm_lab import SlurmLab

class Slurm(TargetUnderTest):
    kind = "slurm"
    settings: Mapping[str, Any] = {"time": "30"}
    slack_s = 30.0

    def __init__(self, folder: Path, lab: SlurmLab) -> None:
        super().__init__(folder)
        self.lab = lab

    @property
    def whole(self) -> Mapping[str, Any]:
        return {**super().whole, "process_count_per_node": 4}

    def left(self, run: Run) -> list[str]:
        jobs = [line for line in self.lab.run("squeue", "-h", "-o", "%i %j %T").splitlines() if run.id in line]
        return [*super().left(run), *jobs]

    def lose_node(self, name: str) -> None:
        self.lab.kill_node(name)

    def bring_back(self, name: str) -> None:
        self.lab.boot_node(name)

@pytest.fixture(scope="module")
def slurm_under_test(tmp_path_factory):
    with slurm_lab.cluster("pbc") as lab:
        yield Slurm(tmp_path_factory.mktemp("slurm"), lab)

class TestSlurm(TargetConformance):
    @pytest.fixture
    def under_test(self, slurm_under_test, any_mpirun, monkeypatch):
        for name, value in slurm_under_test.lab.environment.items():
            monkeypatch.setenv(name, value)
        yield slurm_under_test
