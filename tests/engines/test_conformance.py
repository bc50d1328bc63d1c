"""Each compute target passes the suite that Paceline ships, and one job is the same on all of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.runs import lock
from paceline.runs.run import Run
from paceline.testing.targets import TargetConformance, TargetUnderTest
from tests.engines.conftest import require_engine
from tests.engines.hosts import Hosts
from tests.engines.hosts import missing as hosts_missing


class Local(TargetUnderTest):
    """This machine."""

    kind = "local"
    never_fits: Mapping[str, Any] = {"use_gpu": True}
    slack_s = float(os.environ.get("SLACK", "30"))

    @property
    def whole(self) -> Mapping[str, Any]:
        cores = len(os.sched_getaffinity(0))
        return {"process_count_per_node": cores, "distributed_backend": "gloo"}

    def left(self, run: Run) -> list[str]:
        tickets = Path(os.environ["PACELINE_LEASES"]).glob("tickets/*")
        mine = [path for path in tickets if run.id in path.read_text()]
        # One whose run nobody looks after counts no more; the next run that asks removes it.
        return [*super().left(run), *(str(path) for path in mine if lock.is_held(run.folder.lock))]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Local:
    return Local(tmp_path_factory.mktemp("local"))


class TestLocal(TargetConformance):
    @pytest.fixture
    def under_test(self, local: Local, any_mpirun: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
        monkeypatch.setenv("PACELINE_GPUS", "")
        yield local


class Ssh(TargetUnderTest):
    """Three hosts; a run on several nodes gets two."""

    kind = "ssh"
    has_spare_node = True
    slack_s = float(os.environ.get("SLACK", "30"))

    def __init__(self, folder: Path, hosts: Hosts) -> None:
        super().__init__(folder)
        self.hosts = hosts
        self.shared_folder = hosts.folder
        self.settings = {"hosts": list(hosts.names), "ssh_config": str(hosts.ssh_config), "python": sys.executable}

    @property
    def whole(self) -> Mapping[str, Any]:
        return {**super().whole, "node_count": len(self.hosts.names)}

    def left(self, run: Run) -> list[str]:
        found, record = super().left(run), run.record()
        # What nobody could fetch stays where it is.
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


@pytest.fixture(scope="session")
def ssh_hosts() -> Iterator[Hosts]:
    why = hosts_missing()
    require_engine(f"hosts in namespaces: {why}", why is None)
    with Hosts("pe").up(3) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def ssh_that_crashes(ssh_hosts: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Ssh:
    return SshThatCrashes(tmp_path_factory.mktemp("ssh"), ssh_hosts)


@pytest.fixture(scope="module")
def ssh_that_is_cut_off(ssh_hosts: Hosts) -> Ssh:
    folder = ssh_hosts.folder / "shared"
    folder.mkdir()
    return SshThatIsCutOff(folder, ssh_hosts)


class TestSsh(TargetConformance):
    @pytest.fixture
    def under_test(self, ssh_that_crashes: Ssh, any_mpirun: str) -> Ssh:
        return ssh_that_crashes


class TestSshWithASharedFolder(TargetConformance):
    @pytest.fixture
    def under_test(self, ssh_that_is_cut_off: Ssh, any_mpirun: str) -> Ssh:
        return ssh_that_is_cut_off
