"""How a compute target stands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.targets.status import NodeStatus, Status, host_status


def node(name: str, **values: object) -> NodeStatus:
    return NodeStatus(name=name, **values)


def test_cores_of_down_nodes_are_excluded_from_the_target_status():
    status = Status(
        nodes=(node("a", cores=8, used_cores=2, gpus=2, used_gpus=1), node("b", cores=8, is_up=False, state="drained"))
    )
    assert (status.cores, status.used_cores, status.gpus, status.used_gpus) == (8, 2, 2, 1)


def test_unknown_core_count_of_a_target_is_none():
    assert Status(nodes=(node("a"),)).cores is None


@pytest.mark.parametrize(
    ("ups", "state"), [((True, True), "up"), ((True, False), "degraded"), ((False, False), "down"), ((), "down")]
)
def test_target_is_up_degraded_or_down_if_all_some_or_none_of_its_nodes_are_up(ups, state):
    assert Status(nodes=tuple(node(str(index), is_up=up) for index, up in enumerate(ups))).state == state


def test_target_status_has_json():
    status = Status(nodes=(node("a", cores=2, used_cores=0),), queued=3, running=1)
    told = json.loads(json.dumps(status.to_json()))
    assert (told["state"], told["cores"], told["queued"]) == ("up", 2, 3)
    assert (told["nodes"][0]["name"], told["nodes"][0]["used_cores"]) == ("a", 0)


def test_gpu_used_outside_paceline_counts_as_used() -> None:
    held: dict[str, Any] = {"run_id": "a", "cores": 1, "gpu_count": 1, "granted": {"gpus": ["0"]}}
    found = host_status(
        "gpu1", {"cores": 4, "gpus": ["0", "1", "2"], "tickets": [held], "blocked": {"2": "used by bob"}}
    )
    assert (found.gpus, found.used_gpus) == (3, 2)
