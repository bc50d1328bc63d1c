"""`local` as `paceline compute` sees it."""

from __future__ import annotations

import os
import socket

import pytest

from paceline.errors import TargetError
from paceline.runs.folder import RunFolder
from paceline.system import locks
from paceline.targets.local_leases import LocalQueue, leases_dir
from paceline.targets.this_machine import ThisMachine


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
        queue.enqueue(folder.path, cores=cores, gpus=gpus, ports=1)
        if grant:
            queue.try_grant(folder.path)

    yield put, lambda: os.close(held.pop())
    while held:
        os.close(held.pop())


def test_what_runs_hold_and_who_waits_is_told(queued):
    put, _ = queued
    put("a_1_00000001", 1, gpus=1, grant=True)
    put("a_1_00000002", 1)
    status = ThisMachine().status()
    assert (status.running, status.queued) == (1, 1)
    (node,) = status.nodes
    assert (node.name, node.used_cores, node.gpus, node.used_gpus) == (socket.gethostname(), 1, 2, 1)


def test_a_run_that_nobody_looks_after_holds_nothing(queued):
    put, let_go = queued
    put("a_1_00000001", 1, grant=True)
    assert ThisMachine().status().running == 1
    let_go()
    assert ThisMachine().status().running == 0


def test_it_has_no_settings():
    with pytest.raises(TargetError, match="has no setting 'nodes'; it has none at all"):
        ThisMachine("local", {"nodes": 3})
    assert ThisMachine().status().queued == 0
