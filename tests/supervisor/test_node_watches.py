"""Asking the workers of an elastic run to end at their next checkpoint; the nodes are stand-ins."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.launchers.environment import resize_request
from paceline.remote.agent.machine import is_low
from paceline.supervisor import node_watches
from paceline.supervisor.node_watches import DiskWatch, OomWatch, ResizeWatch
from tests.helpers import make_job, make_launch

GB = 10**9


def watch(tmp_path: Path, found: int, put: bool = False, not_before_s: float = 0.0):
    job = make_job(node_count=(1, 3), distributed_backend="gloo").resized(2)
    launch = dataclasses.replace(make_launch(job, node_count=2), job=job, scratch_dir=tmp_path)
    sent: list[tuple[int, str, bytes]] = []
    nodes = SimpleNamespace(put=lambda *what: sent.append(what)) if put else SimpleNamespace()
    notes: list[str] = []
    made = ResizeWatch(launch, nodes, not_before_s, lambda: found, notes.append)
    return SimpleNamespace(watch=made, path=resize_request(launch), sent=sent, notes=notes)


def test_resize_request_file_is_written_when_more_nodes_become_available(tmp_path: Path) -> None:
    # Four nodes are available, and the job takes at most three.
    made = watch(tmp_path, found=4)
    made.watch.look()
    made.watch.look()
    assert (made.watch.requested, json.loads(made.path.read_text())) == (3, {"nodes": 3})
    assert made.notes == ["goes on with 3 nodes after its next checkpoint"]


def test_resize_request_file_is_sent_to_each_remote_node(tmp_path: Path) -> None:
    made = watch(tmp_path, found=3, put=True)
    made.watch.look()
    assert [(rank, path) for rank, path, _ in made.sent] == [(0, str(made.path)), (1, str(made.path))]
    assert not made.path.exists()


def test_no_resize_is_requested_too_early_or_without_more_nodes(tmp_path: Path) -> None:
    for made in (watch(tmp_path, found=3, not_before_s=600.0), watch(tmp_path, found=2)):
        made.watch.look()
        assert (made.watch.requested, made.path.exists(), made.notes) == (0, False, [])


@pytest.mark.parametrize(
    ("total", "least"),
    [(1 * GB, 0.1), (15 * GB, 1.5), (30 * GB, 2), (100 * GB, 5), (1000 * GB, 20), (20_000 * GB, 20)],
    ids=str,
)
def test_low_disk_threshold_depends_on_the_disk_size(total, least):
    assert is_low(int(least * GB) - 1, total)
    assert not is_low(int(least * GB) + 1, total)


class Nodes:
    """Nodes with preset disks: path -> (free, total, number)."""

    def __init__(self, **found) -> None:
        self.found = found

    def disks(self, paths):
        return {path: self.found[path] for path in paths if path in self.found}


def test_low_disk_is_reported_once_per_disk(monkeypatch):
    monkeypatch.setattr(node_watches, "_DISK_LOOK_S", 0.0)
    told: list[str] = []
    nodes = Nodes(**{"/run": (50 * GB, 100 * GB, 1), "/out": (50 * GB, 100 * GB, 1), "/run on b": (9 * GB, 90 * GB, 1)})
    watch = DiskWatch(nodes, ["/run", "/out", "/run on b"], told.append)
    watch.look()
    assert told == []
    nodes.found |= {"/run": (3 * GB, 100 * GB, 1), "/out": (3 * GB, 100 * GB, 1), "/run on b": (1 * GB, 90 * GB, 1)}
    watch.look()
    watch.look()
    first, second = told
    assert first.startswith("the disk of /run is nearly full: 3.0 GB of 100.0 GB are left.")
    assert second.startswith("the disk of /run on b is nearly full: 1.0 GB")


def test_small_disk_sizes_are_reported_in_megabytes():
    told: list[str] = []
    DiskWatch(Nodes(**{"/run": (5_400_000, 67_100_000, 1)}), ["/run"], told.append).look()
    assert told[0].startswith("the disk of /run is nearly full: 5.4 MB of 67.1 MB are left.")


def test_nodes_without_disk_information_are_not_queried():
    DiskWatch(object(), ["/run"], pytest.fail).look()


def test_only_recent_kills_for_memory_on_a_workers_own_node_count(monkeypatch):
    counts = [{0: 7, 1: 5}]
    watch = OomWatch(SimpleNamespace(oom_kills=lambda: counts[-1]))
    counts.append({0: 7, 1: 6})
    assert [watch.has_killed(node) for node in (0, 1, 2)] == [False, True, False]
    watch.look()  # so soon after the first query it asks nothing
    assert watch.has_killed(1)
    monkeypatch.setattr(node_watches, "_OOM_LOOK_S", 0.0)
    watch._next = 0.0
    watch.look()
    assert watch.has_killed(1)
    watch._next = 0.0
    watch.look()
    assert not watch.has_killed(1)
    counts.append({1: 6})  # node 0 does not answer
    watch._next = 0.0
    watch.look()
    counts.append({0: 8, 1: 6})
    assert [watch.has_killed(node) for node in (0, 1)] == [True, False]
