"""Disks that are about to be full: when that is, and that it is said once of each."""

from __future__ import annotations

import pytest

from paceline.remote.agent.machine import is_low
from paceline.supervisor import disks
from paceline.supervisor.disks import DiskWatch

GB = 10**9


@pytest.mark.parametrize(
    ("total", "least"),
    [(1 * GB, 0.1), (15 * GB, 1.5), (30 * GB, 2), (100 * GB, 5), (1000 * GB, 20), (20_000 * GB, 20)],
    ids=str,
)
def test_a_disk_is_low_by_its_size(total, least):
    assert is_low(int(least * GB) - 1, total)
    assert not is_low(int(least * GB) + 1, total)


class Nodes:
    """Their disks, as they are told: path -> (free, total, number)."""

    def __init__(self, **found) -> None:
        self.found = found

    def disks(self, paths):
        return {path: self.found[path] for path in paths if path in self.found}


def test_each_disk_is_warned_of_once(monkeypatch):
    monkeypatch.setattr(disks, "_LOOK_S", 0.0)
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


def test_small_sizes_are_told_in_megabytes():
    told: list[str] = []
    DiskWatch(Nodes(**{"/run": (5_400_000, 67_100_000, 1)}), ["/run"], told.append).look()
    assert told[0].startswith("the disk of /run is nearly full: 5.4 MB of 67.1 MB are left.")


def test_nodes_of_a_target_that_can_t_tell_are_not_asked():
    DiskWatch(object(), ["/run"], pytest.fail).look()
