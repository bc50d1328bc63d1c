"""Fixtures for real runs: scripts that are submitted to `local`, with any Open MPI of this machine."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines import hosts, ray_lab, slurm_lab
from tests.engines.conformance import Local, is_left_to_proof
from tests.engines.hosts import Hosts
from tests.engines.lab import SYSTEM, WHEEL, Lab, find_mpirun, processes_below
from tests.engines.ray_lab import RayLab
from tests.engines.slurm_lab import SlurmLab
from tests.warm import TENSORFLOW, submitting_with, warm_python

#: Read this variable on import, because a fixture later removes it from the environment.
_REQUIRED = bool(os.environ.get("PACELINE_REQUIRE_ENGINES"))


def require_engine(name: str, found: object) -> None:
    """Skip the test where the machine lacks an engine; with PACELINE_REQUIRE_ENGINES set, fail it."""
    if found:
        return
    if _REQUIRED:
        pytest.fail(f"PACELINE_REQUIRE_ENGINES is set, but there is no {name} that can be used")
    pytest.skip(f"needs {name}")


def require_module(name: str) -> None:
    """Skip the test, or fail it, where a package is not installed. It is not imported: TensorFlow takes seconds, and stays."""
    require_engine(name, importlib.util.find_spec(name))


def use_mpirun(which: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let runs with backend "mpi" use this Open MPI; its mpirun."""
    found = find_mpirun(which)
    require_engine(which, found)
    assert found is not None
    monkeypatch.setenv("PACELINE_MPIRUN", found)
    return found


@pytest.fixture(params=[WHEEL, SYSTEM], ids=["wheel", "system"])
def mpirun(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each Open MPI of this machine in turn."""
    return use_mpirun(request.param, monkeypatch)


@pytest.fixture
def any_mpirun(monkeypatch: pytest.MonkeyPatch) -> str:
    """One Open MPI, for tests that do not depend on its release."""
    return use_mpirun(WHEEL if find_mpirun(WHEEL) else SYSTEM, monkeypatch)


@pytest.fixture(params=["single", "gloo", "mpi-wheel", pytest.param("mpi-system", marks=pytest.mark.proof)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Each way to start workers, as an estimator's arguments: one process, or two with each backend. What differs between
    one Open MPI and the other, the tests with `mpirun` ask of both."""
    return _arguments(request.param, monkeypatch)


@pytest.fixture(params=["single", "mpi"])
def parent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Each kind of parent that a worker can have, as an estimator's arguments: the supervisor, or a process of its own
    below mpirun."""
    return _arguments(request.param, monkeypatch)


def _arguments(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    if name == "single":
        return {}
    if name == "gloo":
        return {"process_count_per_node": 2, "distributed_backend": "gloo"}
    is_wheel = name == "mpi-wheel" or (name == "mpi" and find_mpirun(WHEEL))
    use_mpirun(WHEEL if is_wheel else SYSTEM, monkeypatch)
    return {"process_count_per_node": 2, "distributed_backend": "mpi"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if is_left_to_proof(item.nodeid):
            item.add_marker(pytest.mark.proof)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A test that failed on Slurm says what Slurm has done: its folder is gone with the tests."""
    report = yield
    found = [one for one in getattr(item, "funcargs", {}).values() if isinstance(one, SlurmLab)]
    if report.when == "call" and report.failed:
        with contextlib.suppress(subprocess.SubprocessError, OSError):
            report.sections += [("Slurm", lab.told()) for lab in dict.fromkeys(found)]
    return report


@pytest.fixture(scope="session")
def local(tmp_path_factory: pytest.TempPathFactory) -> Local:
    """This machine as a compute target, which others are compared with."""
    return Local(tmp_path_factory.mktemp("local"))


@pytest.fixture(scope="session")
def ssh_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Three hosts with sshd, and two imaginary GPUs each."""
    why = hosts.missing()
    require_engine(f"hosts in namespaces: {why}", why is None)
    private = hosts.apart(tmp_path_factory.getbasetemp())
    with Hosts("pa", private=private, environment={"PACELINE_GPUS": "3,5"}).up(3) as found:
        yield found


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[SlurmLab]:
    """Slurm with two nodes that see this machine's files."""
    lacks = slurm_lab.missing()
    require_engine(f"Slurm ({lacks})" if lacks else "Slurm", not lacks)
    with slurm_lab.cluster("pb") as found:
        yield found


# Stop the cluster after this package's tests, because an idle cluster takes 3.5 CPU seconds a minute.
@pytest.fixture(scope="package")
def ray_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayLab]:
    """A Ray cluster of a head and two nodes."""
    why = ray_lab.missing()
    require_engine(f"a Ray cluster, and for that {why}", why is None)
    with ray_lab.cluster(hosts.apart(tmp_path_factory.getbasetemp())) as found:
        yield found


@pytest.fixture(scope="session")
def python_with_torch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Python whose workers have torch loaded before they start."""
    require_module("torch")
    with warm_python(tmp_path_factory.mktemp("warm")) as python:
        yield python


@pytest.fixture(scope="session")
def python_with_tensorflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Python whose workers have TensorFlow loaded before they start."""
    require_module("tensorflow")
    with warm_python(tmp_path_factory.mktemp("warm"), kind=TENSORFLOW) as python:
        yield python


@pytest.fixture
def torch_at_hand(python_with_torch: Path) -> Iterator[None]:
    """Runs on this machine have torch without the time that it takes to load (`tests.warm.python`)."""
    with submitting_with(python_with_torch):
        yield


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """A place to submit scripts from. In the end, no process of its runs and nothing that they held may be left."""
    yield Lab(tmp_path)
    deadline = time.monotonic() + 60
    while (left := processes_below(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"left behind (and killed now): {left}"
    tickets = list((tmp_path / "leases").glob("tickets/*.ticket"))
    assert not tickets, f"ended without giving back what it held: {[ticket.read_text() for ticket in tickets]}"
