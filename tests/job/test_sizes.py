"""How many nodes a job asks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline import PyTorch
from paceline.errors import JobError
from paceline.job.job import Job
from paceline.job.sizes import node_range
from tests.helpers import make_job


@pytest.mark.parametrize("given", [(2, 4), [2, 4], "2..4"], ids=str)
def test_node_count_range_is_parsed_from_a_tuple_a_list_or_text(given: Any) -> None:
    assert node_range(given) == (2, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((4, 2), r"node_count=\(4, 2\): the fewest nodes come first. Write \(2, 4\)"),
        ("0..3", "node_count=0..3: a run has at least one node. Write 1..3"),
        ((0, 3), r"node_count=\(0, 3\): a run has at least one node. Write \(1, 3\)"),
        ((1, 2, 3), "neither an integer of 1 or more nor two of them"),
        ((1, True), "neither an integer of 1 or more nor two of them"),
        ("2..", "neither an integer of 1 or more nor two of them"),
        (0, "node_count=0 is not an integer of 1 or more"),
    ],
    ids=str,
)
def test_invalid_node_range_is_refused_with_the_valid_form(given: Any, message: str) -> None:
    with pytest.raises(JobError, match=message):
        make_job(node_count=given, distributed_backend="gloo")


def test_new_elastic_job_has_its_maximum_node_count(tmp_path: Any) -> None:
    (tmp_path / "train.py").touch()
    made = PyTorch(
        str(tmp_path),
        entry_script="train.py",
        node_count=(2, 4),
        process_count_per_node=2,
        distributed_backend="gloo",
        elastic_seconds="2m",  # type: ignore[arg-type]
    ).job()

    assert (made.node_count, made.node_range, made.world_size, made.elastic_seconds) == (4, (2, 4), 8, 120.0)
    assert (made.least_nodes, made.size_text) == (2, "2..4x2")
    assert Job.from_json(made.to_json()) == made
    assert (made.resized(3).world_size, made.resized(3).node_range) == (6, (2, 4))
    assert (made.at_most(3).node_count, made.at_most(3).node_range) == (3, (2, 3))
    # The minimum stays two nodes, even if at most one node is requested. A range with a single value becomes a fixed
    # number of nodes.
    assert (made.at_most(1).node_count, made.at_most(1).node_range) == (2, None)
    with pytest.raises(JobError, match="not among"):
        made.resized(5)
    with pytest.raises(JobError, match="integer of 2 or more"):
        replace(made, node_count=1)


def test_node_range_with_equal_bounds_equals_a_fixed_node_count() -> None:
    assert make_job(node_count=(2, 2), distributed_backend="gloo") == make_job(node_count=2, distributed_backend="gloo")
