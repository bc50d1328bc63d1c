"""Calls to a cluster's dashboard, and its refusals."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import EngineError, TargetError
from paceline.system.detached_process import library_dir
from paceline.system.files import read_json, write_json
from paceline.targets import polling
from paceline.targets.polling import FRESH_S
from paceline.targets.ray import client as client_module
from paceline.targets.ray.client import Jobs, RayClient, RayJob, UnreachableError, all_jobs, is_loopback
from paceline.targets.ray.settings import read_settings
from tests.targets.ray.fake_cluster import FakeCluster, fake_cluster

ADDRESS = "http://head:8265"


def client(cluster: FakeCluster, **settings: Any) -> RayClient:
    return RayClient(read_settings("lab", {"address": cluster.address, **settings}))


def test_ray_job_is_submitted_listed_and_stopped(cluster: FakeCluster) -> None:
    ray = client(cluster)
    ray.submit("echo 'a \"b\"'; $(x)", "paceline-1", {"env_vars": {"A": "1"}}, {"job_name": "x"})
    assert cluster.jobs["paceline-1"]["entrypoint"] == "echo 'a \"b\"'; $(x)"
    assert [(job.submission_id, job.status) for job in ray.jobs()] == [("paceline-1", "PENDING")]
    ray.stop("paceline-1")
    found = ray.job("paceline-1")
    assert found is not None
    assert found.status == "STOPPED"


def test_known_job_id_is_not_submitted_twice(cluster: FakeCluster) -> None:
    ray = client(cluster)
    ray.submit("first", "paceline-1", {}, {})
    ray.submit("second", "paceline-1", {}, {})
    assert cluster.jobs["paceline-1"]["entrypoint"] == "first"


def test_unknown_ray_job_is_returned_as_none_and_stopping_it_raises_no_error(cluster: FakeCluster) -> None:
    ray = client(cluster)
    assert ray.job("a/../b") is None
    ray.stop("never heard of")
    assert ray.logs("never heard of") == ""
    # A job's name is escaped, so it stays one part of the path.
    assert "GET /api/jobs/a%2F..%2Fb" in cluster.asked


def test_nodes_are_listed_with_used_resources(cluster: FakeCluster) -> None:
    cluster.add_node("10.0.0.1", CPU=4.0, GPU=2.0)
    cluster.add_node("10.0.0.2", state="DEAD")
    first, second = client(cluster).nodes(usage=True)
    assert (first.name, first.is_alive, first.total["CPU"], first.used["CPU"]) == ("10.0.0.1", True, 4.0, 1.5)
    assert not second.is_alive


def test_uploaded_package_is_found_on_the_ray_cluster(cluster: FakeCluster) -> None:
    ray = client(cluster)
    assert not ray.has_package("_ray_pkg_1.zip")
    ray.upload_package("_ray_pkg_1.zip", b"\0\1")
    assert ray.has_package("_ray_pkg_1.zip")
    assert cluster.packages == {"_ray_pkg_1.zip": b"\0\1"}


def test_requests_to_loopback_ignore_proxy_variables(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert client(cluster).jobs() == []
    assert [is_loopback(f"http://{host}:8265") for host in ("[::1]", "localhost", "10.0.0.1", "head")] == [
        True,
        True,
        False,
        False,
    ]


def test_request_to_a_cluster_that_is_down_raises_unreachable_error() -> None:
    with fake_cluster() as gone:
        pass
    with pytest.raises(UnreachableError, match=f"{gone.address} does not answer: .*Connection refused"):
        client(gone).jobs()


def test_missing_and_wrong_token_raise_different_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_cluster(token="right") as cluster:
        with pytest.raises(TargetError, match="wants a token, and there is none"):
            client(cluster).jobs()
        monkeypatch.setenv("LAB", "wrong-hush")
        with pytest.raises(TargetError, match="does not take this token") as caught:
            client(cluster, token_env="LAB").jobs()
        assert "hush" not in str(caught.value)
        monkeypatch.setenv("LAB", "right")
        assert client(cluster, token_env="LAB").jobs() == []


def test_ray_token_moves_to_another_header_if_a_proxy_needs_the_authorization_header(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LAB", "right")
    monkeypatch.setenv("PROXY", "Basic abc")
    with fake_cluster() as cluster:
        client(cluster, token_env="LAB", headers=["Authorization: env:PROXY", "X-Team: a"]).jobs()
        sent = cluster.headers[-1]
    assert (sent["authorization"], sent["x-ray-authorization"], sent["x-team"]) == ("Basic abc", "Bearer right", "a")


def test_error_for_a_failed_ray_request_has_the_message_without_the_traceback(cluster: FakeCluster) -> None:
    cluster.answer = lambda *_: (500, "Traceback (most recent call last):\n  ...\nRuntimeError: no agent")  # type: ignore[method-assign]
    with pytest.raises(
        EngineError, match=r"could not answer GET /api/jobs/: HTTP 500: RuntimeError: no agent\. Try again"
    ):
        client(cluster).jobs()
    cluster.answer = lambda *_: (400, "ValueError: no such env")  # type: ignore[method-assign]
    with pytest.raises(TargetError, match=r"refuses GET /api/jobs/: HTTP 400: ValueError: no such env\.$"):
        client(cluster).jobs()


def test_http_503_of_a_proxy_raises_unreachable_error(cluster: FakeCluster) -> None:
    cluster.answer = lambda *_: (503, "upstream connect error")  # type: ignore[method-assign]
    with pytest.raises(UnreachableError, match="HTTP 503") as caught:
        client(cluster).submit("true", "x", {}, {})
    assert not isinstance(caught.value, ValueError)
    assert client(cluster).logs("x") == ""


def test_html_answer_is_refused_as_no_ray_dashboard(cluster: FakeCluster) -> None:
    cluster.answer = lambda *_: (200, "<html>")  # type: ignore[method-assign]
    with pytest.raises(TargetError, match="not as a Ray dashboard does"):
        client(cluster).jobs()


def test_a_redirect_gets_no_token(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAB", "right")
    cluster.answer = lambda *_: (302, "elsewhere")  # type: ignore[method-assign]
    with pytest.raises(TargetError, match="HTTP 302"):
        client(cluster, token_env="LAB").jobs()
    assert len(cluster.asked) == 1


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


@pytest.fixture
def _long_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers stay fresh: a busy machine may stop this process for more than 5 s between two reads."""
    monkeypatch.setattr(polling, "FRESH_S", 600.0)


@pytest.mark.usefixtures("_long_fresh")
def test_concurrent_status_reads_share_one_request(tmp_path: Path) -> None:
    cluster = Cluster()
    readers = [threading.Thread(target=lambda: [look(tmp_path, cluster) for _ in range(50)]) for _ in range(4)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert cluster.asked == 1
    assert set(look(tmp_path, cluster).jobs) == {"paceline-a"}


def test_expired_cached_answer_is_requested_again(tmp_path: Path) -> None:
    cluster = Cluster()
    look(tmp_path, cluster)
    (path,) = (tmp_path / "engines").glob("ray-*.json")
    write_json(path, {**read_json(path), "told": time.time() - FRESH_S})
    look(tmp_path, cluster)
    assert cluster.asked == 2


def test_cached_answer_with_a_future_time_is_ignored(tmp_path: Path) -> None:
    cluster = Cluster()
    look(tmp_path, cluster)
    (path,) = (tmp_path / "engines").glob("ray-*.json")
    write_json(path, {**read_json(path), "told": time.time() + 3600})
    look(tmp_path, cluster)
    assert cluster.asked == 2


@pytest.mark.usefixtures("_long_fresh")
def test_failure_of_an_unreachable_cluster_is_cached(tmp_path: Path) -> None:
    cluster = Cluster("the cluster does not answer")
    for _ in range(3):
        with pytest.raises(UnreachableError, match="does not answer"):
            look(tmp_path, cluster)
    assert cluster.asked == 1


def test_cached_answers_are_kept_per_cluster(tmp_path: Path) -> None:
    first, second = Cluster(), Cluster()
    all_jobs(tmp_path, ADDRESS, first.jobs, "paceline-")
    all_jobs(tmp_path, "http://other:8265", second.jobs, "paceline-")
    assert (first.asked, second.asked) == (1, 1)


def test_paceline_library_is_packed_only_once_for_several_runs(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[Any] = []
    monkeypatch.setattr(client_module, "packed_library", lambda folder: packed.append(folder) or b"zip")
    folder = library_dir(tmp_path)
    uri = client_module.send_library(client(cluster), folder)
    assert client_module.send_library(client(cluster), folder) == uri
    assert packed == [folder]
    assert cluster.packages == {uri.removeprefix("gcs://"): b"zip"}
