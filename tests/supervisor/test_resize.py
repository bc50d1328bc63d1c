"""Asking the workers of an elastic run to end at their next checkpoint; the nodes are stand-ins."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

from paceline.launchers.environment import resize_request
from paceline.supervisor.resize import ResizeWatch
from tests.helpers import make_job, make_launch


def watch(tmp_path: Path, found: int, put: bool = False, not_before_s: float = 0.0):
    job = make_job(node_count=(1, 3), distributed_backend="gloo").resized(2)
    launch = dataclasses.replace(make_launch(job, node_count=2), job=job, scratch_dir=tmp_path)
    sent: list[tuple[int, str, bytes]] = []
    nodes = SimpleNamespace(put=lambda *what: sent.append(what)) if put else SimpleNamespace()
    notes: list[str] = []
    made = ResizeWatch(launch, nodes, not_before_s, lambda: found, notes.append)
    return SimpleNamespace(watch=made, path=resize_request(launch), sent=sent, notes=notes)


def test_workers_here_find_a_file_once_more_nodes_are_to_be_had(tmp_path: Path) -> None:
    # Four are there, and the job takes three at most.
    made = watch(tmp_path, found=4)
    made.watch.look()
    made.watch.look()
    assert (made.watch.requested, json.loads(made.path.read_text())) == (3, {"nodes": 3})
    assert made.notes == ["goes on with 3 nodes after its next checkpoint"]


def test_each_node_elsewhere_is_sent_the_file(tmp_path: Path) -> None:
    made = watch(tmp_path, found=3, put=True)
    made.watch.look()
    assert [(rank, path) for rank, path, _ in made.sent] == [(0, str(made.path)), (1, str(made.path))]
    assert not made.path.exists()


def test_nobody_is_asked_too_early_or_for_no_more_than_there_is(tmp_path: Path) -> None:
    for made in (watch(tmp_path, found=3, not_before_s=600.0), watch(tmp_path, found=2)):
        made.watch.look()
        assert (made.watch.requested, made.path.exists(), made.notes) == (0, False, [])
