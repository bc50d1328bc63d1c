"""Ray passes the suite that Paceline ships, and a job has the same result as on this machine."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.data.stores.datastore import Datastore
from paceline.runs import remote_status
from paceline.runs.record import user_name
from paceline.runs.run import Run
from paceline.targets import polling
from paceline.testing.bench import Bench
from paceline.testing.completing import ReadingChecks
from paceline.testing.targets import TargetConformance, TargetUnderTest
from paceline.workspace import Workspace
from tests.engines.conformance import FRESH_S, GRACE_S, SILENCE_S, SameAsLocal
from tests.engines.ray_lab import TOKEN, TOKEN_VARIABLE, RayLab


class Ray(TargetUnderTest):
    """A head and two nodes."""

    kind = "ray"
    has_spare_node = True
    slack_s = 60.0

    def __init__(self, folder: Path, cluster: RayLab) -> None:
        super().__init__(folder)
        self.cluster = cluster
        self.settings = {"address": cluster.address, "token_env": TOKEN_VARIABLE, "silence_s": SILENCE_S}

    @property
    def whole(self) -> Mapping[str, Any]:
        return {**super().whole, "node_count": len(self.cluster.hosts.names)}

    def left(self, run: Run) -> list[str]:
        return [*super().left(run), *(f"{name}: {lines}" for name, lines in self.cluster.left().items())]

    def node_to_lose(self, names: Sequence[str]) -> str:
        """Not the head, with which the cluster would go."""
        return next(name for name in reversed(names) if name != self.cluster.head)

    def lose_node(self, name: str) -> None:
        self.cluster.lose_ray(name)

    def bring_back(self, name: str) -> None:
        """Two are left, which are enough for the next run; the node is back for the next test that wants all."""
        self.cluster.lose(name)


@pytest.fixture(scope="module")
def ray(ray_cluster: RayLab) -> Ray:
    folder = ray_cluster.folder / "conformance"
    folder.mkdir()
    return Ray(folder, ray_cluster)


class TestRay(SameAsLocal):
    # test_ray.py has this test, with the default time after which a silent node counts as lost.
    test_a_run_continues_after_the_loss_of_a_node = None  # type: ignore[assignment]

    @pytest.fixture
    def under_test(self, ray: Ray, any_mpirun: str, monkeypatch: pytest.MonkeyPatch) -> Ray:
        monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
        monkeypatch.setattr(remote_status, "_GRACE_S", GRACE_S)
        monkeypatch.setattr(polling, "FRESH_S", FRESH_S)
        ray.cluster.whole()
        return ray


class RayWithADatastore(Ray):
    """The same nodes, which see nothing of the workspace: runs travel through a datastore."""

    def __init__(self, folder: Path, cluster: RayLab) -> None:
        super().__init__(folder, cluster)
        self.shared_folder = None
        between = Path(tempfile.mkdtemp(prefix="between-", dir=cluster.folder))
        # Register the datastore in the workspace of the conformance tests (`workspace_dir`).
        Datastore.register(Workspace(folder / "ws"), "between", str(between))
        self.settings = {**self.settings, "datastore": "between"}


class TestRayWithADatastore(ReadingChecks):
    """Checks that differ from a workspace that nodes see."""

    bench = TargetConformance.bench

    def test_metrics_logs_and_outputs_can_be_read_while_a_run_runs(self, bench: Bench) -> None:
        super().test_metrics_logs_and_outputs_can_be_read_while_a_run_runs(bench)
        (run,) = bench.runs
        assert run.record().canceled_by == user_name()

    @pytest.fixture
    def under_test(self, ray_cluster: RayLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RayWithADatastore:
        monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
        monkeypatch.setattr(remote_status, "_GRACE_S", GRACE_S)
        return RayWithADatastore(tmp_path, ray_cluster)
