"""A process's copy of Jobs and pods follows a watch, and begins again with a list when the watch breaks."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any, cast

import pytest

from paceline.errors import EngineError
from paceline.targets.kubernetes import look
from paceline.targets.kubernetes.api import Cluster
from tests.helpers import wait_until


def thing(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": str(version)}}


class Objects:
    """A cluster with the lists of `pages`, each used once, and the events that a test puts into `events`."""

    def __init__(self, *pages: list[dict[str, Any]]) -> None:
        self._pages = list(pages)
        self.listed_count = 0
        self.watched_from: list[str] = []
        self.events: queue.Queue[tuple[str, dict[str, Any]] | Exception | None] = queue.Queue()

    def listed(self, kind: str, **params: str) -> tuple[list[dict[str, Any]], str]:
        self.listed_count += 1
        return self._pages.pop(0), str(100 * self.listed_count)

    def watch(self, kind: str, version: str, **params: str) -> Iterator[tuple[str, dict[str, Any]]]:
        self.watched_from.append(version)
        while (event := self.events.get(timeout=30)) is not None:
            if isinstance(event, Exception):
                raise event
            yield event


def watched(cluster: Objects, monkeypatch: pytest.MonkeyPatch) -> look.Watched:
    monkeypatch.setattr(look, "_LIST_S", 0.0)
    monkeypatch.setattr(look, "_RELIST_S", 0.0)
    return look.Watched(cast("Cluster", cluster), "pods", "a=b")


def test_first_read_of_kubernetes_objects_lists_them_and_later_reads_follow_the_watch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Objects([thing("a", 1)], [thing("a", 1), thing("b", 2)])
    found = watched(cluster, monkeypatch)
    assert list(found.read()) == ["a"]
    assert cluster.watched_from == []
    assert sorted(found.read()) == ["a", "b"]
    cluster.events.put(("ADDED", thing("c", 3)))
    cluster.events.put(("DELETED", thing("a", 4)))
    cluster.events.put(("MODIFIED", thing("b", 5)))
    cluster.events.put(("BOOKMARK", thing("", 6)))
    cluster.events.put(None)  # the API server ends the watch

    wait_until(lambda: cluster.watched_from == ["200", "6"], "the watch goes on after its last version")

    assert {name: one["metadata"]["resourceVersion"] for name, one in found.read().items()} == {"b": "5", "c": "3"}
    assert cluster.listed_count == 2
    cluster.events.put(EngineError("the test ends"))


def test_kubernetes_objects_are_listed_again_after_their_watch_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Objects([thing("a", 1)], [thing("a", 1)], [thing("b", 9)])
    found = watched(cluster, monkeypatch)
    found.read()
    found.read()

    cluster.events.put(EngineError("too old resource version"))

    wait_until(lambda: list(found.read()) == ["b"], "the list replaces the copy")
    wait_until(lambda: cluster.watched_from == ["200", "300"], "a watch follows the list")
    cluster.events.put(EngineError("the test ends"))


def test_watch_of_kubernetes_objects_ends_if_unused_and_the_next_read_lists_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Objects([], [], [thing("a", 9)])
    found = watched(cluster, monkeypatch)
    monkeypatch.setattr(look, "_IDLE_S", -1.0)
    found.read()
    found.read()

    wait_until(lambda: not found._is_watching, "the watch ends")

    assert cluster.watched_from == []
    assert list(found.read()) == ["a"]
