"""Each compute target passes the suite that Paceline ships, and one job is the same on all of them."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.data.stores.datastore import Datastore
from paceline.runs import remote_status
from paceline.runs.run import Run
from paceline.system import locks
from paceline.testing.bench import Bench, seen, states_of, text_of
from paceline.testing.completing import WAYS
from paceline.testing.losing import LosingChecks
from paceline.testing.reading import ReadingChecks
from paceline.testing.targets import TargetConformance, TargetUnderTest
from paceline.testing.worker_environment import comparable, expected
from paceline.workspace import Workspace
from tests.engines import ray_lab, slurm_lab
from tests.engines.conftest import require_engine
from tests.engines.elsewhere import logged_in
from tests.engines.hosts import Hosts
from tests.engines.hosts import missing as hosts_missing
from tests.engines.ray_lab import TOKEN, TOKEN_VARIABLE, RayLab
from tests.engines.ray_lab import missing as ray_missing
from tests.engines.slurm_lab import SlurmLab

#: Variables of a worker that follow from the node's cores and network.
PLACE = {"OMP_NUM_THREADS", "OMPI_MCA_btl", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
#: What readers leave to a supervisor whose job is gone: these clusters' files are this machine's, where nothing is late.
GRACE_S = 2.0


class Local(TargetUnderTest):
    """This machine."""

    kind = "local"
    never_fits: Mapping[str, Any] = {"use_gpu": True}
    slack_s = 30.0

    @property
    def whole(self) -> Mapping[str, Any]:
        cores = len(os.sched_getaffinity(0))
        return {"process_count_per_node": cores, "distributed_backend": "gloo"}

    def left(self, run: Run) -> list[str]:
        tickets = Path(os.environ["PACELINE_LEASES"]).glob("tickets/*")
        mine = [path for path in tickets if run.id in path.read_text()]
        # One whose run nobody looks after counts no more; the next run that asks removes it.
        return [*super().left(run), *(str(path) for path in mine if locks.is_held(run.folder.lock))]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Local:
    return Local(tmp_path_factory.mktemp("local"))


class TestLocal(TargetConformance):
    @pytest.fixture
    def under_test(self, local: Local, any_mpirun: str, monkeypatch: pytest.MonkeyPatch) -> Local:
        monkeypatch.setenv("PACELINE_GPUS", "")
        return local


class Ssh(TargetUnderTest):
    """Three hosts; a run on several nodes gets two."""

    kind = "ssh"
    has_spare_node = True
    slack_s = 30.0

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


class Slurm(TargetUnderTest):
    """Two nodes, and a controller on this machine, whose files they see."""

    kind = "slurm"
    settings: Mapping[str, Any] = {"time": "10"}
    # What slurmd's silence may last, and ours after Slurm's notice.
    node_lost_s = 40.0
    slack_s = 30.0

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


class Ray(TargetUnderTest):
    """A head and two nodes."""

    kind = "ray"
    has_spare_node = True
    # What Ray itself needs to notice, and ours after that.
    node_lost_s = 40.0
    slack_s = 30.0

    def __init__(self, folder: Path, cluster: RayLab) -> None:
        super().__init__(folder)
        self.cluster = cluster
        self.settings = {"address": cluster.address, "token_env": TOKEN_VARIABLE}

    @property
    def whole(self) -> Mapping[str, Any]:
        return {**super().whole, "node_count": len(self.cluster.hosts.names)}

    def left(self, run: Run) -> list[str]:
        return [*super().left(run), *(f"{name}: {lines}" for name, lines in self.cluster.left().items())]

    def node_to_lose(self, names: Sequence[str]) -> str:
        """Not the head, with which the cluster would go."""
        return next(name for name in reversed(names) if name != self.cluster.head)

    def lose_node(self, name: str) -> None:
        self.cluster.hosts.kill(name)

    def bring_back(self, name: str) -> None:
        self.cluster.revive(name)


@pytest.mark.timeout(240)
class SameAsLocal(TargetConformance):
    """The suite, and that a run is what it would be on `local`."""

    @WAYS
    def test_a_run_is_what_it_would_be_on_this_machine(
        self, bench: Bench, local: Local, backend: str | None, request: pytest.FixtureRequest
    ) -> None:
        run, here = bench.plain(backend), Bench(local).plain(backend)

        assert states_of(run) == states_of(here)
        assert files_of(run) == files_of(here)
        assert (run.get_metrics(by_rank=True), run.tags) == (here.get_metrics(by_rank=True), here.tags)
        (mine,), (theirs,) = run.record().attempts, here.record().attempts
        assert mine.exit_codes == theirs.exit_codes
        for rank in map(int, mine.exit_codes):
            assert text_of(run.folder.live_log(rank)) == text_of(here.folder.live_log(rank))
            found = [seen(one, rank) for one in (run, here)]
            names = [expected(one, rank, what["environment"]) for one, what in zip((run, here), found, strict=True)]
            assert set(names[0]) - PLACE == set(names[1]) - PLACE
            assert comparable(found[0]["environment"], set(names[0]) - PLACE) == comparable(
                found[1]["environment"], set(names[1]) - PLACE
            )
            same = ("argv", "stdin", "tool", "link", "sum", "blob", "python")
            assert {name: found[0][name] for name in same} == {name: found[1][name] for name in same}


def files_of(run: Run) -> dict[str, str]:
    """Name -> hash, of what the script has left; what each worker saw is compared by itself."""
    found = {}
    for top in (run.folder.outputs, run.folder.checkpoints, run.folder.artifacts):
        for path in top.rglob("*"):
            if path.is_file() and not path.name.startswith("seen_"):
                found[str(path.relative_to(run.folder.path))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


@pytest.fixture(scope="module")
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


class TestSsh(SameAsLocal):
    @pytest.fixture
    def under_test(self, ssh_that_crashes: Ssh, any_mpirun: str) -> Ssh:
        return ssh_that_crashes


class TestSshWithASharedFolder(LosingChecks):
    """What differs from folders of the hosts' own, and a host that is cut off."""

    bench = TargetConformance.bench

    @pytest.fixture
    def under_test(self, ssh_that_is_cut_off: Ssh, any_mpirun: str) -> Ssh:
        return ssh_that_is_cut_off


@pytest.fixture(scope="class")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    lacks = slurm_lab.missing()
    require_engine(f"Slurm ({lacks})" if lacks else "Slurm", not lacks)
    with slurm_lab.cluster("pf") as cluster:
        yield Slurm(tmp_path_factory.mktemp("slurm"), cluster)


class TestSlurm(SameAsLocal):
    @pytest.fixture
    def under_test(self, slurm: Slurm, any_mpirun: str, monkeypatch: pytest.MonkeyPatch) -> Slurm:
        for name, value in slurm.cluster.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(remote_status, "_GRACE_S", GRACE_S)
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
    """What differs from a workspace that nodes see."""

    bench = TargetConformance.bench

    @pytest.fixture
    def under_test(
        self, slurm_cluster: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> Iterator[SlurmBehindALoginHost]:
        monkeypatch.setattr(remote_status, "_GRACE_S", GRACE_S)
        for name, value in slurm_cluster.environment.items():
            monkeypatch.setenv(name, value)  # for the check of what is left, which asks Slurm on this machine
        with logged_in(slurm_cluster):
            yield SlurmBehindALoginHost(tmp_path, slurm_cluster)


@pytest.fixture(scope="class")
def ray() -> Iterator[Ray]:
    lacks = ray_missing()
    require_engine(f"a Ray cluster, and for that {lacks}", lacks is None)
    with ray_lab.cluster() as cluster:
        folder = cluster.folder / "conformance"
        folder.mkdir()
        yield Ray(folder, cluster)


class TestRay(SameAsLocal):
    @pytest.fixture
    def under_test(self, ray: Ray, any_mpirun: str, monkeypatch: pytest.MonkeyPatch) -> Ray:
        monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
        monkeypatch.setattr(remote_status, "_GRACE_S", GRACE_S)
        return ray


class RayWithADatastore(Ray):
    """The same nodes, which see nothing of the workspace: runs travel through a datastore."""

    def __init__(self, folder: Path, cluster: RayLab) -> None:
        super().__init__(folder, cluster)
        self.shared_folder = None
        between = Path(tempfile.mkdtemp(prefix="between-", dir=cluster.folder))
        Datastore.register(Workspace(folder / "ws"), "between", str(between))  # where `workspace_dir` is
        self.settings = {**self.settings, "datastore": "between"}


class TestRayWithADatastore(ReadingChecks):
    """What differs from a workspace that nodes see."""

    bench = TargetConformance.bench

    @pytest.fixture
    def under_test(self, ray_cluster: RayLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RayWithADatastore:
        monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
        monkeypatch.setattr(remote_status, "_GRACE_S", GRACE_S)
        return RayWithADatastore(tmp_path, ray_cluster)
