from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.job.job import Job
from paceline.job.plan import places, port_count, preview_ports
from tests.helpers import make_job


def drawing(job: Job) -> str:
    """One line a node: its workers and parameter servers by their index, in order of rank."""
    lines = [""] * job.node_count
    for place in places(job):
        lines[place.node_rank] += f" {place.role[0]}{place.index}"
    return "\n".join(line.strip() for line in lines)


def test_consecutive_ranks_share_a_node():
    job = make_job(distributed_backend="gloo", node_count=3, process_count_per_node=2)
    assert drawing(job) == "w0 w1\nw2 w3\nw4 w5"


def test_parameter_servers_are_placed_after_the_workers():
    job = make_job(distributed_backend="ps", worker_count=3, parameter_server_count=2, node_count=2)
    assert drawing(job) == "w0 w1 w2\np0 p1"


def test_a_node_may_hold_workers_and_parameter_servers():
    job = make_job(distributed_backend="ps", worker_count=1, parameter_server_count=4, node_count=2)
    assert drawing(job) == "w0 p0 p1\np2 p3"


def test_single_process_job_is_placed_as_rank_0_on_one_node():
    (place,) = places(make_job())
    assert (place.rank, place.node_rank, place.local_rank, place.local_world_size) == (0, 0, 0, 1)


@st.composite
def distributed_jobs(draw: st.DrawFn) -> Job:
    if draw(st.booleans()):
        sizes = {"node_count": draw(st.integers(1, 20)), "process_count_per_node": draw(st.integers(1, 20))}
        return make_job(distributed_backend="gloo", **sizes)
    workers, servers = draw(st.integers(1, 30)), draw(st.integers(1, 30))
    nodes = draw(st.integers(1, workers + servers))
    return make_job(distributed_backend="ps", worker_count=workers, parameter_server_count=servers, node_count=nodes)


@given(distributed_jobs())
def test_node_and_local_rank_of_every_worker_follow_from_its_rank(job):
    found = places(job)
    workers = job.world_size - job.parameter_server_count
    assert [place.rank for place in found] == list(range(job.world_size))
    # The ranks fill one node after the other, and local ranks start at 0 on each node.
    for before, after in pairwise(found):
        assert (after.node_rank, after.local_rank) in (
            (before.node_rank, before.local_rank + 1),
            (before.node_rank + 1, 0),
        )
    # Node sizes differ by at most one, and each worker knows the size of its node.
    sizes = [sum(place.node_rank == node for place in found) for node in range(job.node_count)]
    assert max(sizes) - min(sizes) <= 1
    assert all(place.local_world_size == sizes[place.node_rank] for place in found)
    # Parameter servers have the last ranks and separate indices.
    assert [(place.role, place.index) for place in found] == [("worker", i) for i in range(workers)] + [
        ("ps", i) for i in range(job.parameter_server_count)
    ]


@pytest.mark.parametrize(
    ("values", "count"),
    [
        ({}, 2),
        ({"distributed_backend": "gloo", "node_count": 4}, 2),
        ({"distributed_backend": "tensorflow", "node_count": 4}, 6),
        ({"distributed_backend": "ps", "worker_count": 2, "parameter_server_count": 1}, 5),
    ],
)
def test_tensorflow_job_gets_two_ports_plus_a_port_for_each_worker(values, count):
    assert port_count(make_job(**values)) == count
    assert preview_ports(make_job(**values)) == tuple(range(29500, 29500 + count))
