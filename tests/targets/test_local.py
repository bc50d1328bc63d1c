from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from paceline.errors import TargetError
from paceline.remote.agent import machine
from paceline.runs.folder import RunFolder
from paceline.system import locks
from paceline.system.memory import Memory
from paceline.system.processes import core_count
from paceline.targets import local
from paceline.targets.local import LocalTarget, ThisMachine
from paceline.targets.local_leases import LeaseRequest, LocalDemand, LocalQueue, leases_dir
from tests.helpers import make_job, make_run


@pytest.fixture
def target(monkeypatch):
    """This machine, as if it had eight cores."""
    monkeypatch.setattr(local, "core_count", lambda: 8)
    return LocalTarget()


# --- Nodes of the local target


def nodes(granted):
    return [(node.node_rank, node.name, node.address, node.cores, node.gpus) for node in granted.nodes]


def test_preview_has_this_machine_as_one_node(target):
    granted = target.preview(make_job())
    assert nodes(granted) == [(0, "local", "127.0.0.1", 8, ())]
    assert len(granted.ports) == 2


def test_local_nodes_are_simulated_and_share_the_cores(target):
    granted = target.preview(make_job(distributed_backend="gloo", node_count=3))
    assert nodes(granted) == [(rank, f"local-{rank}", "127.0.0.1", 2, ()) for rank in range(3)]


def test_every_local_node_has_at_least_one_core(target):
    granted = target.preview(make_job(distributed_backend="gloo", node_count=20))
    assert {node.cores for node in granted.nodes} == {1}


def test_each_node_gets_a_gpu_for_each_of_its_workers(target, monkeypatch):
    monkeypatch.setenv("PACELINE_GPUS", "4,5,6,7,8")
    granted = target.preview(make_job(use_gpu=True, distributed_backend="nccl", node_count=2, process_count_per_node=2))
    assert [node.gpus for node in granted.nodes] == [("4", "5"), ("6", "7")]


def test_job_without_use_gpu_gets_no_gpu(target, monkeypatch):
    monkeypatch.setenv("PACELINE_GPUS", "0,1")
    assert [node.gpus for node in target.preview(make_job()).nodes] == [()]


def test_nodes_with_different_process_counts_get_one_gpu_for_each_process(target, monkeypatch):
    monkeypatch.setenv("PACELINE_GPUS", "0,1,2")
    job = make_job(use_gpu=True, distributed_backend="ps", worker_count=2, parameter_server_count=1, node_count=2)
    assert [node.gpus for node in target.preview(job).nodes] == [("0", "1"), ("2",)]


def test_tensorflow_gets_a_port_for_each_worker(target):
    job = make_job(distributed_backend="tensorflow", process_count_per_node=3)
    assert len(target.preview(job).ports) == 5


def test_preview_of_a_local_run_holds_no_lease(target, tmp_path):
    target.preview(make_job())
    assert list(tmp_path.iterdir()) == []


def test_core_count_respects_the_cpu_affinity():
    assert core_count() == (len(os.sched_getaffinity(0)) if sys.platform.startswith("linux") else os.cpu_count())


# --- Jobs that can never fit


@pytest.mark.parametrize(
    ("gpus", "workers", "said"),
    [
        ("", 1, "has no GPUs. Set use_gpu=False"),
        ("0", 2, "has 1 GPU. Ask for at most 1 worker, or"),
        ("0,1", 3, "has 2 GPUs. Ask for at most 2 workers, or"),
    ],
)
def test_more_gpus_than_there_are_is_refused(target, monkeypatch, gpus, workers, said):
    monkeypatch.setenv("PACELINE_GPUS", gpus)
    with pytest.raises(TargetError) as refused:
        target.check(make_job(use_gpu=True, distributed_backend="nccl", process_count_per_node=workers))
    assert said in str(refused.value)
    assert f"{workers} worker" in str(refused.value)


def test_job_with_more_workers_than_cores_is_granted(target):
    target.check(make_job(distributed_backend="gloo", process_count_per_node=100))


def test_more_workers_than_the_memory_can_hold_are_refused(target, monkeypatch):
    monkeypatch.setattr(local, "memory", lambda: Memory(1 << 30, 1 << 30, ""))
    target.check(make_job(distributed_backend="gloo", process_count_per_node=128))
    with pytest.raises(TargetError, match=r"200000 workers do not fit .* at most 128 workers"):
        target.check(make_job(distributed_backend="gloo", process_count_per_node=200_000))


# --- Waiting runs


@pytest.fixture
def run(tmp_path):
    """Return a function that makes the folder of a supervised run."""
    fds = []

    def make(name: str) -> Path:
        path = tmp_path / "runs" / name
        path.mkdir(parents=True)
        fds.append(locks.take(path / "lock"))
        return path

    yield make
    for fd in fds:
        os.close(fd)


def test_run_waits_for_free_cores_and_names_the_run_it_waits_for(target, run):
    job = make_job(distributed_backend="gloo", process_count_per_node=8)
    first, second = run("first"), run("second")
    target.enqueue(job, first)
    target.enqueue(job, second)
    assert target.wait_for_nodes(job, first, pytest.fail) is not None
    told: list[str] = []

    def waiting(text):
        told.append(text)
        if len(told) == 3:
            target.release(first)
        return False

    granted = target.wait_for_nodes(job, second, waiting)
    assert [node.name for node in granted.nodes] == ["local"]
    assert set(told) == {"waits for 1 run (first)"}


def test_run_canceled_while_it_waits_for_cores_gets_no_nodes(target, run):
    job = make_job(distributed_backend="gloo", process_count_per_node=8)
    for name in ("first", "second"):
        target.enqueue(job, run(name))
    target.wait_for_nodes(job, Path("runs/first").absolute(), lambda text: True)
    assert target.wait_for_nodes(job, Path("runs/second").absolute(), lambda text: True) is None


def test_waiting_reason_names_the_first_of_many_runs_ahead(target, run):
    job = make_job(distributed_backend="gloo", process_count_per_node=8)
    for name in ("a", "b", "c", "d", "last"):
        path = run(name)
        target.enqueue(job, path)
    told: list[str] = []
    target.wait_for_nodes(job, path, lambda text: bool(told.append(text)) or True)
    assert told == ["waits for 4 runs (a, b, c, ...)"]


@pytest.mark.promise("run-waits-names-holder-folder")
def test_waiting_reason_names_the_hanging_run_that_holds_the_cores_and_its_folder(target, run, tmp_path):
    job = make_job(distributed_backend="gloo", process_count_per_node=8)
    elsewhere = tmp_path / "other" / ".paceline" / "runs"
    folder, fd = make_run(elsewhere, status="Running")
    second = run("second")
    target.enqueue(job, folder.path)
    target.enqueue(job, second)
    nodes = target.wait_for_nodes(job, folder.path, pytest.fail)
    nodes.note_hang("2026-11-23 06:12:03 UTC")
    told: list[str] = []
    target.wait_for_nodes(job, second, lambda text: bool(told.append(text)) or True)
    (hanging, _) = ThisMachine().status().jobs
    assert hanging.reason == "hangs since 2026-11-23 06:12:03 UTC"
    nodes.note_hang(None)
    assert ThisMachine().status().jobs[0].reason == ""
    os.close(fd)
    assert told == [
        f"waits for 1 run ({folder.run_id} in {tmp_path / 'other'}). {folder.run_id} hangs since 2026-11-23 06:12:03 UTC: "
        f"`paceline cancel {folder.run_id}` in its folder ends it"
    ]


def test_waiting_run_names_the_user_of_the_blocking_run(target, run, monkeypatch):
    job = make_job(distributed_backend="gloo", process_count_per_node=8)
    first, second = run("first"), run("second")
    for path in (first, second):
        target.enqueue(job, path)
    target.wait_for_nodes(job, first, pytest.fail)
    monkeypatch.setattr(os, "geteuid", lambda: 12345678)
    monkeypatch.setattr(local, "user_name", lambda uid: "ann")
    told: list[str] = []
    target.wait_for_nodes(job, second, lambda text: bool(told.append(text)) or True)
    assert told == ["waits for 1 run (first of ann)"]


@pytest.mark.promise("run-cores-0-waits-cores")
def test_run_that_needs_no_cores_starts_on_a_full_machine(target, run):
    job = make_job(distributed_backend="gloo", process_count_per_node=8)
    first, second, light = run("first"), run("second"), run("light")
    for path in (first, second):
        target.enqueue(job, path)
    target.wait_for_nodes(job, first, pytest.fail)
    none = make_job(cores=0)
    target.enqueue(none, light)
    assert target.wait_for_nodes(none, light, pytest.fail) is not None


def test_run_waits_if_the_cores_that_it_reserves_for_each_worker_are_not_free(target, run):
    first, second = run("first"), run("second")
    target.enqueue(make_job(cores=5), first)
    target.enqueue(make_job(cores=4), second)
    target.wait_for_nodes(make_job(cores=5), first, pytest.fail)
    assert target.wait_for_nodes(make_job(cores=4), second, lambda text: True) is None


# --- After an attempt


def test_occupied_port_is_replaced_without_releasing_the_lease(target, run):
    job = make_job(distributed_backend="gloo", process_count_per_node=8)
    first, second = run("first"), run("second")
    for path in (first, second):
        target.enqueue(job, path)
    nodes = target.wait_for_nodes(job, first, pytest.fail)
    before = nodes.ports
    nodes.renew_ports()
    assert len(nodes.ports) == len(before)
    assert not set(nodes.ports) & set(before)
    # No other run gets the new ports, and waiting runs keep waiting.
    ticket = json.loads(min((leases_dir() / "tickets").iterdir()).read_text())
    assert (ticket["run_dir"], tuple(ticket["granted"]["ports"])) == (str(first), nodes.ports)
    assert target.wait_for_nodes(job, second, lambda text: True) is None


def test_no_free_ports_raises_target_error(target, run, monkeypatch):
    job, path = make_job(), run("first")
    target.enqueue(job, path)
    nodes = target.wait_for_nodes(job, path, pytest.fail)
    monkeypatch.setattr(machine, "free_ports", lambda count, taken: [])
    with pytest.raises(TargetError, match="no 2 ports are free on this machine"):
        nodes.renew_ports()


def test_run_that_released_its_nodes_returns_to_the_end_of_the_queue(target, run):
    job = make_job(distributed_backend="gloo", process_count_per_node=8)
    first, second = run("first"), run("second")
    for path in (first, second):
        target.enqueue(job, path)
    target.wait_for_nodes(job, first, pytest.fail)
    target.release(first)
    told: list[str] = []
    assert target.wait_for_nodes(job, first, lambda text: bool(told.append(text)) or True) is None
    assert told == ["waits for 1 run (second)"]
    assert target.wait_for_nodes(job, second, pytest.fail) is not None


@pytest.fixture
def queued(tmp_path, monkeypatch):
    """(Puts a run that somebody looks after into this machine's queue, leaves the last one alone.)"""
    monkeypatch.setenv("PACELINE_GPUS", "0,1")
    held = []

    def put(name, cores, gpus=0, grant=False):
        folder = RunFolder(tmp_path / "runs" / name)
        folder.path.mkdir(parents=True)
        fd = locks.take(folder.lock)
        assert fd is not None
        held.append(fd)
        queue = LocalQueue(leases_dir(), os.cpu_count() or 1, ("0", "1"))
        queue.enqueue(folder.path, LocalDemand(nodes=1, cores=cores, gpus=gpus), LeaseRequest(ports=1))
        if grant:
            queue.try_grant(folder.path)

    yield put, lambda: os.close(held.pop())
    while held:
        os.close(held.pop())


def test_status_reports_used_resources_and_queue_length(queued):
    put, _ = queued
    put("a_1_00000001", 1, gpus=1, grant=True)
    put("a_1_00000002", 1)
    status = ThisMachine().status()
    assert (status.running, status.queued) == (1, 1)
    (node,) = status.nodes
    assert (node.name, node.used_cores, node.gpus, node.used_gpus) == (socket.gethostname(), 1, 2, 1)


def test_run_without_a_supervisor_holds_no_resources(queued):
    put, let_go = queued
    put("a_1_00000001", 1, grant=True)
    assert ThisMachine().status().running == 1
    let_go()
    assert ThisMachine().status().running == 0


def test_local_target_refuses_settings():
    with pytest.raises(TargetError, match="has no setting 'nodes'; it has none at all"):
        ThisMachine("local", {"nodes": 3})
    assert ThisMachine().status().queued == 0
