import subprocess
import sys

import pytest

from paceline.errors import TargetError
from paceline.remote.link import Hello, LinkError
from paceline.targets.slurm import allocation as allocations
from paceline.targets.slurm.allocation import Allocation, common_addresses, link_words, srun_words, step_environment
from paceline.targets.slurm.settings import SlurmSettings
from tests.helpers import make_job

ENVIRONMENT = {
    "SLURM_JOB_ID": "42",
    "SLURM_JOB_NODELIST": "n[1-2],gpu7",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2),64",
    "SLURMD_NODENAME": "n1",
    "SLURM_RESTART_COUNT": "2",
}


def hello(host: str, **interfaces: str) -> Hello:
    return Hello(
        host=host,
        user="me",
        home="/home/me",
        python=("/usr/bin/python3", (3, 11, 2)),
        cores=64,
        gpus=(),
        interfaces={"lo": ("127.0.0.1", 8), **{name: (address, 24) for name, address in interfaces.items()}},
        env={},
        pid=1,
        time=0.0,
        boot_id="",
        library="",
        folder="",
    )


def test_allocated_nodes_are_read_from_the_environment_of_the_slurm_batch_step():
    assert Allocation.of(ENVIRONMENT) == Allocation(
        job_id="42", nodes=("n1", "n2", "gpu7"), cores=(8, 8, 64), here="n1", restarts=2
    )


@pytest.mark.parametrize("name", ["SLURM_JOB_ID", "SLURM_JOB_NODELIST"])
def test_allocation_outside_a_job_raises_target_error(name: str):
    with pytest.raises(TargetError, match="not in a job of Slurm's"):
        Allocation.of({key: value for key, value in ENVIRONMENT.items() if key != name})


@pytest.mark.promise("how-long-silent-node-waited")
def test_connections_to_slurm_nodes_time_out_after_the_silence_limit_of_the_target(
    monkeypatch: pytest.MonkeyPatch, tmp_path
):
    asked: list[float] = []

    def refuse(argv, *, name, silence_s, **_):
        asked.append(silence_s)
        raise LinkError(f"{name}: no")

    monkeypatch.setattr(allocations.Link, "open", refuse)
    settings = SlurmSettings.of("lab", {"silence_s": 6})
    job = make_job(node_count=2, distributed_backend="gloo")
    with pytest.raises(LinkError, match="n1: no"):
        allocations.open_nodes(Allocation.of(ENVIRONMENT), job, settings, tmp_path, lambda text: False)
    assert asked == [6, 6]


def test_first_slurm_node_needs_no_srun_step_and_steps_on_other_nodes_get_the_overlap_option():
    allocation = Allocation.of(ENVIRONMENT)
    assert link_words(allocation, "n1")[0] == sys.executable
    words = link_words(allocation, "n2")
    assert words[: len(srun_words("42", "n2"))] == srun_words("42", "n2")
    assert {"--jobid=42", "--overlap", "--nodes=1", "--ntasks=1", "--nodelist=n2", "--mem=0", "--unbuffered"} <= set(
        words
    )
    assert words[-4:] == link_words(allocation, "n1")


def test_steps_and_workers_do_not_inherit_slurm_variables():
    batch = {
        "PATH": "/bin",
        "SLURM_JOB_ID": "42",
        "SLURM_CPUS_PER_TASK": "4",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_MEM_PER_CPU": "500",
        "SLURM_MEM_PER_NODE": "4000",
        "SLURM_EXPORT_ENV": "NONE",
        "SRUN_CPUS_PER_TASK": "4",
        "PYTHONPATH": "/ws/lib/0123",
        "PACELINE_SHELL_PYTHONPATH": "/home/me/lib",
    }
    assert step_environment(batch) == {"PATH": "/bin", "SLURM_JOB_ID": "42", "PYTHONPATH": "/home/me/lib"}
    assert "PYTHONPATH" not in step_environment(batch | {"PACELINE_SHELL_PYTHONPATH": ""})
    told = {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "1",
        "SLURMD_NODENAME": "n2",
        "SRUN_DEBUG": "3",
        "PMIX_RANK": "0",
        "HOME": "/h",
    }
    done = subprocess.run(
        link_words(Allocation.of(ENVIRONMENT), "n1"),
        env=told,
        input=b"print(sorted(os.environ))\n",
        capture_output=True,
        check=True,
    )
    assert b"HOME" in done.stdout
    assert b"SLURM" not in done.stdout
    assert b"PMIX" not in done.stdout


def test_slurm_nodes_use_the_addresses_that_their_host_names_resolve_to(monkeypatch: pytest.MonkeyPatch):
    known = {"n1": "10.0.0.1", "n2": "10.0.0.2"}

    def getaddrinfo(host: str, *_: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        if host not in known:
            raise OSError
        return [(2, 1, 6, "", (known[host], 0))]

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    hellos = [
        hello("n1", docker0="172.17.0.1", eth0="10.0.0.1", ib0="10.1.0.1"),
        hello("n2", eth0="10.0.0.2", ib0="10.1.0.2"),
    ]
    assert common_addresses(["n1", "n2"], hellos, None) == [("10.0.0.1", "eth0"), ("10.0.0.2", "eth0")]
    assert common_addresses(["n1", "n2"], hellos, "ib0") == [("10.1.0.1", "ib0"), ("10.1.0.2", "ib0")]
    # If a node's name can't be resolved, Paceline uses the node's first address that does not belong to a container
    # network.
    known.clear()
    assert common_addresses(["n1", "n2"], hellos, None) == [("10.0.0.1", "eth0"), ("10.0.0.2", "eth0")]


def test_single_node_uses_loopback():
    assert common_addresses(["n1"], [hello("n1", eth0="10.0.0.1")], None) == [("127.0.0.1", "lo")]


def test_missing_interface_is_reported_with_the_available_ones():
    with pytest.raises(TargetError, match="'n2' has no network interface 'ib0' with an IPv4 address; it has eth0, lo"):
        common_addresses(["n1", "n2"], [hello("n1", ib0="10.1.0.1"), hello("n2", eth0="10.0.0.2")], "ib0")


def test_silent_node_is_reported_as_down_after_10_s():
    # A disconnected node still belongs to the job until Slurm detects the loss.
    assert allocations._starts_on([], 1) == "starts"
    assert allocations._starts_on(["n1", "n2"], 1) == "starts on n1, n2"
    assert allocations._starts_on(["n1"], 11).startswith("waits for n1 to answer: down, or cut off?")


def test_nodes_use_a_network_that_all_of_them_share(monkeypatch: pytest.MonkeyPatch):
    known = {"n1": "10.0.1.1", "n2": "10.0.2.1"}

    def getaddrinfo(host: str, *_: object) -> list[tuple[int, int, int, str, tuple[str, int]]]:
        return [(2, 1, 6, "", (known[host], 0))]

    monkeypatch.setattr("socket.getaddrinfo", getaddrinfo)
    hellos = [hello("n1", eth0="10.0.1.1", ib0="10.9.0.1"), hello("n2", eth0="10.0.2.1", ib0="10.9.0.2")]
    assert common_addresses(["n1", "n2"], hellos, None) == [("10.9.0.1", "ib0"), ("10.9.0.2", "ib0")]
    routed = [hello("n1", eth0="10.0.1.1"), hello("n2", eth0="10.0.2.1")]
    assert common_addresses(["n1", "n2"], routed, None) == [("10.0.1.1", "eth0"), ("10.0.2.1", "eth0")]


def test_node_without_an_address_that_other_nodes_can_reach_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("socket.getaddrinfo", lambda *_: [(2, 1, 6, "", ("127.0.1.1", 0))])
    with pytest.raises(TargetError, match=r"node n1 has no IPv4 address .*; it has lo 127\.0\.0\.1\.$"):
        common_addresses(["n1", "n2"], [hello("n1"), hello("n2")], None)
