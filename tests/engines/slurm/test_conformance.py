"""Slurm passes the suite that Paceline ships, and a job has the same result as on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.runs import remote_status
from paceline.runs.run import Run
from paceline.targets import polling
from paceline.testing.completing import ReadingChecks
from paceline.testing.targets import TargetConformance, TargetUnderTest
from tests.engines.conformance import FRESH_S, GRACE_S, SILENCE_S, SameAsLocal
from tests.engines.places import logged_in
from tests.engines.slurm_lab import SlurmLab


class Slurm(TargetUnderTest):
    """Two nodes, and a controller on this machine, whose files they see."""

    kind = "slurm"
    settings: Mapping[str, Any] = {"time": "10", "silence_s": SILENCE_S}
    slack_s = 60.0

    def __init__(self, folder: Path, cluster: SlurmLab) -> None:
        super().__init__(folder)
        self.cluster = cluster

    @property
    def whole(self) -> Mapping[str, Any]:
        return {**super().whole, "process_count_per_node": 4}

    def left(self, run: Run) -> list[str]:
        job = str(remote_status.engine(run.folder).get("job_id"))
        jobs = self.cluster.run("squeue", "-h", "-o", "%i %T %N").splitlines()
        return [*super().left(run), *(line for line in jobs if line.split()[0] == job)]

    def lose_node(self, name: str) -> None:
        self.cluster.kill_node(name)

    def bring_back(self, name: str) -> None:
        self.cluster.boot_node(name)
        self.cluster.wait_for_nodes("idle")


@pytest.fixture(scope="session")
def slurm(slurm_cluster: SlurmLab, tmp_path_factory: pytest.TempPathFactory) -> Slurm:
    return Slurm(tmp_path_factory.mktemp("slurm"), slurm_cluster)


class TestSlurm(SameAsLocal):
    @pytest.fixture
    def under_test(self, slurm: Slurm, any_mpirun: str, monkeypatch: pytest.MonkeyPatch) -> Slurm:
        for name, value in slurm.cluster.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(remote_status, "_GRACE_S", GRACE_S)
        monkeypatch.setattr(polling, "FRESH_S", FRESH_S)
        return slurm


class SlurmBehindALoginHost(Slurm):
    """The same nodes, behind a login host: runs have their folder there, and a copy of it here."""

    has_outputs_early = False

    def __init__(self, folder: Path, cluster: SlurmLab) -> None:
        super().__init__(folder, cluster)
        self.shared_folder = None
        login = {"login": cluster.hosts.names[0], "ssh_config": str(cluster.hosts.ssh_config)}
        self.settings = {**self.settings, **login, "python": sys.executable, "folder": str(folder / "far")}


class TestSlurmBehindALoginHost(ReadingChecks):
    """Checks that differ from a workspace that nodes see."""

    bench = TargetConformance.bench

    @pytest.fixture
    def under_test(
        self, slurm_cluster: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[SlurmBehindALoginHost]:
        monkeypatch.setattr(remote_status, "_GRACE_S", GRACE_S)
        for name, value in slurm_cluster.environment.items():
            monkeypatch.setenv(name, value)  # the check for remaining jobs asks Slurm on this machine
        with logged_in(slurm_cluster):
            yield SlurmBehindALoginHost(tmp_path, slurm_cluster)
