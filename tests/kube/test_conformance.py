"""Kubernetes passes the suite that Paceline ships, as the user with the smallest Role."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.runs import remote_status
from paceline.runs.run import Run
from paceline.targets.kubernetes.manifests import job_name
from paceline.testing.bench import Bench
from paceline.testing.targets import TargetConformance, TargetUnderTest
from tests.helpers import wait_until
from tests.kube.cluster import NARROW, Access

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]


class Kubernetes(TargetUnderTest):
    """A namespace, whose pods have this machine's interpreter and packages."""

    kind = "kubernetes"
    has_queue = False
    has_outputs_early = False
    never_fits: Mapping[str, Any] = {"node_count": 1_000_000, "distributed_backend": "gloo"}
    slack_s = 180.0

    def __init__(self, folder: Path, access: Access, user: str) -> None:
        super().__init__(folder, is_shared=False)
        self.access = access
        self.settings = {
            "kubeconfig": str(access.kubeconfig(user)),
            "image": access.image,
            "cpus_per_worker": 0.25,
            "memory_per_worker": "512Mi",
            # The interpreter is in /root, which only root may read.
            **({"pod_template": str(access.pod_template), "user_id": 0} if access.pod_template else {}),
            **({"python": sys.executable} if access.pod_template else {}),
        }

    def left(self, run: Run) -> list[str]:
        name = job_name(run.id)

        def found() -> list[str]:
            kinds = ("jobs", "pods", "services", "secrets")
            return [one for kind in kinds for one in self.access.names(kind) if name in one]

        # Kubernetes deletes a Job's objects a moment after the Job itself.
        with contextlib.suppress(AssertionError):  # the suite reports any remaining objects
            wait_until(lambda: not found(), f"the objects of {name} are gone", 60)
        return [*super().left(run), *found()]


@pytest.fixture(scope="module")
def kubernetes(access: Access, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubernetes]:
    # These are the rights of the smallest Role, plus the right to forward ports, which large outputs need.
    rights = ["create", "role", "narrow-forward", "--verb=get,create", "--resource=pods/portforward"]
    if access.pod_template is not None:
        access.kubectl(*rights, check=False)
        access.kubectl(
            "create", "rolebinding", "narrow-forward", "--role=narrow-forward", f"--user={NARROW}", check=False
        )
    yield Kubernetes(tmp_path_factory.mktemp("narrow"), access, NARROW)
    # Later tests have the smallest Role alone.
    if access.pod_template is not None:
        access.kubectl("delete", "role,rolebinding", "narrow-forward", check=False)


class ReadingBench(Bench):
    """A bench that reads its runs while it waits: their folders here are copies."""

    def wait_until(self, condition: Callable[[], object], what: str, limit_s: float = 60.0) -> None:
        def looked() -> object:
            for run in self.runs:
                remote_status.refresh(run.folder)
            return condition()

        super().wait_until(looked, what, limit_s)


class TestKubernetes(TargetConformance):
    @pytest.fixture
    def bench(self, under_test: TargetUnderTest) -> Iterator[Bench]:
        found = ReadingBench(under_test)
        yield found
        found.close()

    @pytest.fixture
    def under_test(self, kubernetes: Kubernetes, monkeypatch: pytest.MonkeyPatch) -> Kubernetes:
        monkeypatch.setattr(remote_status, "_GRACE_S", 2.0)
        return kubernetes
