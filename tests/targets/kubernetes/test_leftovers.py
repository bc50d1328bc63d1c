"""Objects that no run needs are removed, and those of a run that begins meanwhile are restored."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

pytest.importorskip("lightkube")

from paceline.runs import states
from paceline.targets.kubernetes import leftovers
from paceline.targets.kubernetes.api import ApiRefusedError, Cluster
from tests.helpers import make_run, write_tree


class Namespace:
    """A namespace with Jobs and Deployments, which use Secrets, and with these Secrets."""

    namespace = "lab"

    def __init__(self, jobs: dict[str, list[str]], secrets: Sequence[str], *, refuses: str = "") -> None:
        self.jobs, self.secrets = jobs, {name: f"content of {name}" for name in secrets}
        #: Name of a Deployment -> the Secrets that its pods use.
        self.deployments: dict[str, list[str]] = {}
        self.runs = dict.fromkeys(jobs, "")
        self._refuses = refuses
        self.on_delete: Callable[[], None] = lambda: None
        #: The kind of the objects that each list request has listed.
        self.listed: list[str] = []

    def items(self, kind: str, *, only_metadata: bool, **params: str) -> list[dict[str, Any]]:
        assert only_metadata
        self.listed.append(kind)
        if kind == self._refuses:
            raise ApiRefusedError("no", 403)
        if kind == "secrets":
            return [{"metadata": {"name": name}} for name in self.secrets]
        objects = self.jobs if kind == "jobs" else self.deployments
        used = {name: {"paceline/secrets": ",".join(names)} for name, names in objects.items()}
        return [
            {"metadata": {"name": name, "annotations": {**about, "paceline/run-id": self.runs.get(name, "")}}}
            for name, about in used.items()
        ]

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        return {"metadata": {"name": name, "uid": "1"}, "data": self.secrets[name]} if name in self.secrets else None

    def delete(self, kind: str, name: str) -> None:
        {"jobs": self.jobs, "deployments": self.deployments, "secrets": self.secrets}[kind].pop(name)  # type: ignore[attr-defined]
        self.on_delete()

    def ensure(self, kind: str, body: dict[str, Any]) -> None:
        assert "uid" not in body["metadata"]
        self.secrets.setdefault(body["metadata"]["name"], body["data"])


def clear(namespace: Namespace, runs_dir: Path, *, dry_run: bool = False) -> list[str]:
    found = leftovers.clear(cast("Cluster", namespace), "label", runs_dir, dry_run=dry_run)
    return [left.text(will_be=dry_run) for left in found]


def test_secrets_that_no_job_uses_are_removed(tmp_path: Path) -> None:
    namespace = Namespace({"pl-a": ["library-2-0"]}, ["library-1-1", "library-1-0", "library-2-0"])
    runs, fd = make_run(tmp_path / "runs", status=states.RUNNING)
    namespace.runs["pl-a"] = runs.run_id
    wanted = [f"secret/library-1-{number}, which no run needs" for number in (0, 1)]
    assert clear(namespace, tmp_path / "runs", dry_run=True) == [f"would remove {one}" for one in wanted]
    assert len(namespace.secrets) == 3

    assert clear(namespace, tmp_path / "runs") == [f"removed {one}" for one in wanted]

    assert list(namespace.secrets) == ["library-2-0"]
    assert list(namespace.jobs) == ["pl-a"]
    os.close(fd)


def test_number_of_list_requests_does_not_grow_with_the_number_of_secrets(tmp_path: Path) -> None:
    few, many = (Namespace({}, [f"library-{number}-0" for number in range(count)]) for count in (1, 20))
    for namespace in (few, many):
        clear(namespace, tmp_path / "runs")

    assert many.secrets == {}
    assert many.listed == few.listed


def test_job_of_an_ended_run_is_removed_with_its_secrets(tmp_path: Path) -> None:
    folder, fd = make_run(tmp_path / "runs", status=states.CANCELED)
    os.close(fd)
    namespace = Namespace({"pl-a": ["source-0"]}, ["source-0"])
    namespace.runs["pl-a"] = folder.run_id

    found = clear(namespace, tmp_path / "runs")

    assert found == [
        f"removed job/pl-a of run {folder.run_id}, which has ended",
        "removed secret/source-0, which no run needs",
    ]
    assert (namespace.jobs, namespace.secrets) == ({}, {})


def test_job_is_not_removed_if_its_run_is_unknown(tmp_path: Path) -> None:
    namespace = Namespace({"pl-a": ["source-0"]}, ["source-0"])
    namespace.runs["pl-a"] = "gone_1_00000000"

    (found,) = leftovers.clear(cast("Cluster", namespace), "label", tmp_path, dry_run=False)

    assert "its run is not in" in found.stays
    assert list(namespace.jobs) == ["pl-a"]
    assert list(namespace.secrets) == ["source-0"]


@pytest.mark.parametrize("kind", ["secrets", "deployments"])
def test_missing_right_to_list_objects_is_reported_when_leftovers_are_removed(tmp_path: Path, kind: str) -> None:
    namespace = Namespace({}, ["a-0"], refuses=kind)

    (found,) = leftovers.clear(cast("Cluster", namespace), "label", tmp_path, dry_run=False)

    assert "may not list secrets and deployments" in found.text()
    assert list(namespace.secrets) == ["a-0"]


def test_secrets_of_a_service_of_this_workspace_or_another_one_stay(tmp_path: Path) -> None:
    namespace = Namespace({}, ["library-0", "package-0", "old-0"])
    namespace.deployments["digits"] = ["library-0", "package-0"]
    write_tree(tmp_path / "services" / "digits", {"cluster.json": "{}"})

    assert clear(namespace, tmp_path / "runs") == ["removed secret/old-0, which no run needs"]

    assert list(namespace.secrets) == ["library-0", "package-0"]


def test_deployment_is_removed_with_its_secrets_if_the_workspace_has_no_such_service(tmp_path: Path) -> None:
    namespace = Namespace({}, ["library-0"])
    namespace.deployments["digits"] = ["library-0"]

    assert clear(namespace, tmp_path / "runs", dry_run=True) == [
        "would remove deployment/digits, which no run needs",
        "would remove secret/library-0, which no run needs",
    ]
    clear(namespace, tmp_path / "runs")

    assert (namespace.deployments, namespace.secrets) == ({}, {})


def test_deleted_secret_is_restored_if_a_job_that_uses_it_appeared_during_the_deletion() -> None:
    namespace = Namespace({}, ["source-0"])
    namespace.on_delete = lambda: namespace.jobs.update({"pl-b": ["source-0"]}) or namespace.runs.update({"pl-b": ""})

    leftovers.remove_unused(cast("Cluster", namespace), ["source-0"], but=["pl-a"])

    assert namespace.secrets == {"source-0": "content of source-0"}
