"""One question to the cluster for all runs."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from paceline.system.files import read_json, write_json
from paceline.targets.poll_cache import FRESH_S
from paceline.targets.ray.client import RayJob, UnreachableError
from paceline.targets.ray.jobs import Jobs, all_jobs

ADDRESS = "http://head:8265"


class Cluster:
    def __init__(self, error: str | None = None) -> None:
        self.asked = 0
        self.error = error

    def jobs(self) -> list[RayJob]:
        self.asked += 1
        time.sleep(0.02)
        if self.error:
            raise UnreachableError(self.error)
        return [RayJob(submission_id=name, status="RUNNING") for name in ("paceline-a", "somebody-elses")]


def look(folder: Path, cluster: Cluster) -> Jobs:
    return all_jobs(folder, ADDRESS, cluster.jobs, "paceline-")


def test_two_hundred_looks_are_one_question(tmp_path: Path) -> None:
    cluster = Cluster()
    readers = [threading.Thread(target=lambda: [look(tmp_path, cluster) for _ in range(50)]) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert cluster.asked == 1
    assert set(look(tmp_path, cluster).jobs) == {"paceline-a"}


def test_an_old_answer_is_asked_for_again(tmp_path: Path) -> None:
    cluster = Cluster()
    look(tmp_path, cluster)
    (path,) = (tmp_path / "engines").glob("ray-*.json")
    write_json(path, {**read_json(path), "told": time.time() - FRESH_S})
    look(tmp_path, cluster)
    assert cluster.asked == 2


def test_an_answer_from_the_future_does_not_count(tmp_path: Path) -> None:
    cluster = Cluster()
    look(tmp_path, cluster)
    (path,) = (tmp_path / "engines").glob("ray-*.json")
    write_json(path, {**read_json(path), "told": time.time() + 3600})
    look(tmp_path, cluster)
    assert cluster.asked == 2


def test_a_cluster_that_is_down_is_not_asked_by_every_reader(tmp_path: Path) -> None:
    cluster = Cluster("the cluster does not answer")
    for _ in range(3):
        with pytest.raises(UnreachableError, match="does not answer"):
            look(tmp_path, cluster)
    assert cluster.asked == 1


def test_clusters_have_an_answer_each(tmp_path: Path) -> None:
    first, second = Cluster(), Cluster()
    all_jobs(tmp_path, ADDRESS, first.jobs, "paceline-")
    all_jobs(tmp_path, "http://other:8265", second.jobs, "paceline-")
    assert (first.asked, second.asked) == (1, 1)
