"""A submission finds Kueue's queue where the user has no choice."""

from __future__ import annotations

from typing import cast

import pytest

pytest.importorskip("lightkube")

from paceline.targets.kubernetes import submission
from paceline.targets.kubernetes.api import ApiRefusedError, Cluster


class Queues:
    """A cluster that lists LocalQueues, or refuses to."""

    def __init__(self, *names: str, refused: int = 0) -> None:
        self._names, self._refused = names, refused

    def items(self, kind: str) -> list[dict[str, dict[str, str]]]:
        assert kind == "localqueues"
        if self._refused:
            raise ApiRefusedError("no", self._refused)
        return [{"metadata": {"name": name}} for name in self._names]


@pytest.mark.parametrize(
    ("queues", "found"),
    [(Queues("gpus"), "gpus"), (Queues(), None), (Queues("gpus", "cpus"), None)],
    ids=["one", "none", "two"],
)
def test_kueue_queue_is_used_automatically_if_a_namespace_has_only_one(queues: Queues, found: str | None) -> None:
    assert submission._only_queue(cast("Cluster", queues)) == found


@pytest.mark.parametrize("code", [403, 404])
def test_cluster_without_kueue_or_the_right_to_list_queues_has_no_queue(code: int) -> None:
    assert submission._only_queue(cast("Cluster", Queues(refused=code))) is None
