"""A service on Kubernetes adopts its pods, undoes an update that can't start, and deletes its objects at its end."""

from __future__ import annotations

import io
import json
import socket
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lightkube")

from paceline.errors import EngineError, ServiceError, TargetError
from paceline.job.plan import NodeSetup
from paceline.services import cluster_server, deploy, keys, store
from paceline.services.cluster_server import ClusterServer
from paceline.services.folder import ServiceFolder
from paceline.services.record import UP, Revision, RevisionModel, ServiceRecord
from paceline.system import locks
from paceline.system.files import read_json, write_json
from paceline.targets.configured import Configured
from paceline.targets.kubernetes.deployment import ServiceState
from paceline.targets.kubernetes.manifests import ServiceContent
from paceline.targets.kubernetes.pod import extract
from paceline.targets.kubernetes.submission import packed_tree
from tests.helpers import write_tree

DONE = ServiceState(exists=True, ready=["digits-a"], is_done=True)
FAILED = ServiceState(exists=True, ready=["digits-a"], failure="init() failed")
WAITS = ServiceState(exists=True, waiting="0 of 1 pods answer, 0/3 nodes have enough free cpu")
SETUP = NodeSetup(python="")


class Objects:
    """The objects of a service in a cluster that does what a test says."""

    def __init__(self) -> None:
        self.state = DONE
        self.served: tuple[str, int] | None = None
        self.puts: list[ServiceContent] = []
        self.restored: list[Any] = []
        self.removed: list[list[str]] = []
        self.error: Exception | None = None
        self.workspace = "label"
        self.cluster = SimpleNamespace(namespace="lab", patiently=self._patiently)

    def _patiently(self, call: Callable[[], Any], *_: object) -> Any:
        if self.error is not None:
            raise self.error
        return call()

    def present(self) -> Any:
        return None if self.served is None else (*self.served, {"earlier": self.served})

    def put(self, content: ServiceContent, count: int, note: Callable[[list[str]], None]) -> None:
        note([f"digits-{content.version}"])
        self.served = (content.version, count)
        self.puts.append(content)

    def replace(self, before: Any) -> None:
        self.restored.append(before)
        self.served = before["earlier"]

    def look(self) -> ServiceState:
        if self.error is not None:
            raise self.error
        return self.state

    def remove_secrets(self, names: list[str]) -> list[str]:
        return names[-1:]

    def remove(self, names: list[str]) -> bool:
        self.removed.append(names)
        return True


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Objects:
    found = Objects()
    target = SimpleNamespace(
        name="k8s",
        settings={},
        make=lambda: SimpleNamespace(service=lambda *_: found),
        to_json=lambda: {"name": "k8s", "kind": "kubernetes", "settings": {}},
    )
    monkeypatch.setattr(cluster_server.configured, "read", lambda *_: target)
    monkeypatch.setattr(cluster_server, "_LOOK_S", 0.0)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> ServiceFolder:
    found = ServiceFolder(tmp_path / "ws" / "services" / "digits")
    for number in (1, 2):
        write_tree(found.revision(number).path, {"models/0/two.txt": str(number)})
    found.logs.mkdir()
    keys.make(found)
    return found


@pytest.fixture
def server(objects: Objects, folder: ServiceFolder) -> Iterator[ClusterServer]:
    with made(folder) as found:
        yield found


class made:  # noqa: N801 - it is used as a function
    """A server for the `with` block."""

    def __init__(self, folder: ServiceFolder) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.server = ClusterServer(folder, self._listener, "k8s")

    def __enter__(self) -> ClusterServer:
        return self.server

    def __exit__(self, *_: object) -> None:
        self._listener.close()


def record(revision: int | None = None) -> ServiceRecord:
    return ServiceRecord(name="digits", target="k8s", has_keys=True, revision=revision, workers=1)


def revision(number: int) -> Revision:
    return Revision(number=number, models=(RevisionModel(id=None, name="two", version="1", file="two.txt"),))


def start(server: ClusterServer, number: int = 1, workers: int = 1, *, served: int | None = None) -> None:
    server.start(f"{number}.1", record(served), revision(number), workers, SETUP)


def test_pods_get_the_packaged_revision_the_keys_and_the_server_packages(
    server: ClusterServer, objects: Objects, folder: ServiceFolder, tmp_path: Path
) -> None:
    start(server, workers=3)

    (content,) = objects.puts
    extract(io.BytesIO(content.package), tmp_path / "package")
    assert (tmp_path / "package" / "models" / "0" / "two.txt").read_text() == "1"
    config = json.loads((tmp_path / "package" / "service.json").read_text())
    assert (config["name"], config["workers"]) == ("digits", 1)
    environment: Any = content.ticket["environment"]
    assert {"starlette", "uvicorn"} <= set(environment["pip_packages"])
    assert content.ticket["variables"] == {
        "PACELINE_KEY": keys.read(folder)[0],
        "PACELINE_SECONDARY_KEY": keys.read(folder)[1],
    }
    assert objects.served is not None
    assert objects.served[1] == 3
    server.leave()


def test_equal_files_give_an_equal_archive(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_tree(tmp_path / name, {"start.py": "1", "models/0/two.txt": "2"})

    assert packed_tree(tmp_path / "a", ".") == packed_tree(tmp_path / "b", ".")
    with tarfile.open(fileobj=io.BytesIO(packed_tree(tmp_path / "a", "."))) as archive:
        assert {time.gmtime(member.mtime)[:3] for member in archive} == {(1980, 1, 1)}, (
            "zip archives have no earlier time"
        )


def test_first_revision_that_can_not_start_ends_the_server_with_the_reason(
    server: ClusterServer, objects: Objects
) -> None:
    start(server)
    objects.state = FAILED

    assert not server.is_ready("1.1")
    assert server.refusal("1.1") is None
    assert server.ended() == "init() failed"
    server.clear()
    assert not server.is_up
    server.leave()


def test_update_that_can_not_start_is_undone_and_the_served_revision_goes_on(
    server: ClusterServer, objects: Objects
) -> None:
    start(server)
    assert server.is_ready("1.1")
    first = objects.served

    server.change("2.2", record(1), revision(2), 1, SETUP)
    objects.state = FAILED

    assert not server.is_ready("2.2")
    assert server.refusal("2.2") == "init() failed"
    assert (objects.served, len(objects.restored)) == (first, 1)
    assert server.ended() is None
    assert server.answers
    server.leave()


def test_undo_is_repeated_until_the_cluster_answers(server: ClusterServer, objects: Objects) -> None:
    start(server)
    assert server.is_ready("1.1")
    server.change("2.2", record(1), revision(2), 1, SETUP)
    objects.state = FAILED
    assert server.ended() is None

    replace, tries = objects.replace, list[Any]()

    def fails_once(before: Any) -> None:
        tries.append(before)
        if len(tries) == 1:
            raise EngineError("the cluster does not answer")
        replace(before)

    objects.replace = fails_once  # type: ignore[method-assign]
    assert server.refusal("2.2") == "init() failed"
    assert objects.restored == []
    assert server.answers

    assert len(objects.restored) == 1
    server.leave()


def test_update_without_room_is_undone_after_its_time_and_its_reason_is_named(
    server: ClusterServer, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(server)
    assert server.is_ready("1.1")
    server.change("2.2", record(1), revision(2), 1, SETUP)
    objects.state = WAITS
    assert not server.is_ready("2.2")
    assert server.refusal("2.2") is None

    monkeypatch.setattr(server, "_start_s", -1.0)

    assert "0/3 nodes have enough free cpu" in str(server.refusal("2.2"))
    assert len(objects.restored) == 1
    server.leave()


def test_next_supervisor_adopts_pods_of_the_same_revision_without_a_change(
    server: ClusterServer, objects: Objects, folder: ServiceFolder
) -> None:
    start(server)
    assert server.is_ready("1.1")
    server.leave()

    with made(folder) as other:
        # One pod is ready while another one is being replaced.
        objects.state = ServiceState(exists=True, ready=["digits-a"])
        start(other, served=1)

        assert other.is_ready("1.1")
        assert len(objects.puts) == 1
        other.leave()


def test_changed_keys_number_of_pods_and_revision_each_change_the_deployment(
    server: ClusterServer, objects: Objects, folder: ServiceFolder
) -> None:
    start(server)
    server.change("1.2", record(1), revision(1), 2, SETUP)
    keys.change(folder, "primary")
    server.change("1.3", record(1), revision(1), 2, SETUP)
    server.change("2.4", record(1), revision(2), 2, SETUP)

    versions = [content.version for content in objects.puts]
    assert len(versions) == 4
    assert versions[0] == versions[1] != versions[2]
    assert objects.puts[0].package == objects.puts[2].package != objects.puts[3].package
    server.leave()


def test_deleted_deployment_ends_the_server(server: ClusterServer, objects: Objects) -> None:
    start(server)
    assert server.is_ready("1.1")
    objects.state = ServiceState(exists=False)

    assert "does not exist any more" in str(server.ended())
    server.leave()


def test_service_answers_no_longer_if_the_api_is_away_for_long(
    server: ClusterServer, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(server)
    assert server.answers
    objects.error = EngineError("the cluster does not answer")
    assert server.answers

    monkeypatch.setattr(cluster_server, "_AWAY_S", 0.0)

    assert not server.answers
    server.leave()


def test_end_deletes_the_objects_and_forgets_them(
    server: ClusterServer, objects: Objects, folder: ServiceFolder
) -> None:
    start(server)
    assert (read_json(folder.cluster) or {})["secrets"] == [f"digits-{objects.puts[0].version}"]

    server.stop()

    assert objects.removed == [[f"digits-{objects.puts[0].version}"]]
    assert not folder.cluster.exists()


def test_stop_recommends_the_prune_command_if_the_cluster_does_not_answer(
    server: ClusterServer, objects: Objects, folder: ServiceFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    start(server)
    objects.error = EngineError("the cluster does not answer.")

    server.stop()

    assert "`paceline prune --compute k8s` removes them" in capsys.readouterr().out
    assert not folder.cluster.exists()


def test_settings_of_a_removed_compute_target_come_from_the_service_folder(
    objects: Objects, folder: ServiceFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_target(*_: object) -> Any:
        raise TargetError("there is no compute target 'k8s'.")

    monkeypatch.setattr(cluster_server.configured, "read", no_target)
    monkeypatch.setattr(Configured, "make", lambda _: SimpleNamespace(service=lambda *_: objects))
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(TargetError):
        ClusterServer(folder, listener, "k8s")
    described = {"name": "k8s", "kind": "kubernetes", "settings": {}}
    write_json(folder.cluster, {"target": described, "secrets": ["digits-1"]})

    with made(folder) as server:
        server.stop()

    assert objects.removed == [["digits-1"]]


def test_deployment_on_kubernetes_is_checked_in_the_cluster_and_refused_with_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    cluster = SimpleNamespace(patiently=lambda call, _: call())
    found = SimpleNamespace(
        service=lambda name, _: SimpleNamespace(check=lambda: checked.append(name), cluster=cluster)
    )
    target = SimpleNamespace(kind="kubernetes", settings={}, make=lambda: found)
    monkeypatch.setattr(deploy.configured, "read", lambda *_: target)

    assert deploy._check_target(tmp_path, "k8s", "digits", has_tls=False)
    assert checked == ["digits"]
    with pytest.raises(ServiceError, match="whose Ingress has the certificate"):
        deploy._check_target(tmp_path, "k8s", "digits", has_tls=True)


def test_deletion_starts_a_supervisor_while_objects_are_in_the_cluster(
    folder: ServiceFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[ServiceFolder] = []
    monkeypatch.setattr(store, "start_supervisor", lambda folder, *_: started.append(folder))
    write_json(folder.record, record(1).to_json())
    write_json(folder.wanted, {"serial": 2, "state": "deleted"})
    write_json(folder.cluster, {"secrets": []})
    folder.lock.touch()
    assert store.desired(folder).state != UP
    assert not locks.is_held(folder.lock)

    assert store.record(folder).name == "digits"

    assert started == [folder]
    assert folder.path.exists()
