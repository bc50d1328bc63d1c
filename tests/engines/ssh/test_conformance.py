"""Hosts over SSH pass the suite that Paceline ships, and a job has the same result as on this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.runs.run import Run
from paceline.testing.ending import LosingChecks
from paceline.testing.targets import TargetConformance, TargetUnderTest
from tests.engines.conformance import SILENCE_S, SameAsLocal
from tests.engines.hosts import Hosts


class Ssh(TargetUnderTest):
    """Three hosts; a run on several nodes gets two."""

    kind = "ssh"
    has_spare_node = True
    slack_s = 60.0

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        super().__init__(folder)
        self.hosts = hosts
        self.shared_folder = hosts.folder
        own = {"hosts": list(hosts.names), "ssh_config": str(hosts.ssh_config), "python": sys.executable}
        # Shorten the time after which a silent host counts as lost. test_ssh.py uses the default.
        self.settings = {**own, "silence_s": SILENCE_S}

    @property
    def whole(self) -> Mapping[str, Any]:
        return {**super().whole, "node_count": len(self.hosts.names)}

    def left(self, run: Run) -> list[str]:
        found, record = super().left(run), run.record()
        # After the loss of a node or a supervisor, the run's folder stays on the host, because it may have unfetched files.
        causes = {attempt.cause for attempt in record.attempts}
        folders = "" if causes & {"node_lost", "supervisor"} else f"/tmp/paceline-root/runs/{run.id}"
        for name in self.hosts.names:
            found += [f"{name}: {command}" for command in self.hosts.processes(name).values()]
            look = ["sh", "-c", f"ls -d /dev/shm/* {folders} 2>&-; true"]
            found += [f"{name}: {line}" for line in self.hosts.run(name, look).stdout.splitlines()]
        return found


class SshThatCrashes(Ssh):
    """Nodes that do not see the workspace, and that crash."""

    def lose_node(self, name: str) -> None:
        self.hosts.kill(name)

    def bring_back(self, name: str) -> None:
        self.hosts.boot(name)


class SshThatIsCutOff(Ssh):
    """Nodes that see the workspace, and whose cable is pulled."""

    def lose_node(self, name: str) -> None:
        self.hosts.cut(name)

    def bring_back(self, name: str) -> None:
        self.hosts.heal(name)


@pytest.fixture(scope="module")
def ssh_that_crashes(ssh_network: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Ssh:
    return SshThatCrashes(tmp_path_factory.mktemp("ssh"), ssh_network)


@pytest.fixture(scope="module")
def ssh_that_is_cut_off(ssh_network: Hosts) -> Ssh:
    folder = ssh_network.folder / "shared"
    folder.mkdir()
    return SshThatIsCutOff(folder, ssh_network)


class TestSsh(SameAsLocal):
    @pytest.fixture
    def under_test(self, ssh_that_crashes: Ssh, any_mpirun: str) -> Ssh:
        return ssh_that_crashes


class TestSshWithASharedFolder(LosingChecks):
    """Checks that differ from hosts with separate folders, and a host whose network is cut."""

    bench = TargetConformance.bench
    # This test is left out here: what follows a loss does not depend on how Paceline has noticed the loss. The class
    # above and test_ssh.py test it with crashed hosts.
    test_a_run_continues_after_the_loss_of_a_node = None  # type: ignore[assignment]

    @pytest.fixture
    def under_test(self, ssh_that_is_cut_off: Ssh, any_mpirun: str) -> Ssh:
        return ssh_that_is_cut_off
