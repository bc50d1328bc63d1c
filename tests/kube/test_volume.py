"""Runs with a volume find built packages and earlier checkpoints there, and leave their outputs on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import TargetError
from tests.environments.wheels import make_wheel
from tests.kube.cluster import NARROW, Cluster
from tests.kube.lab import COUNTS, TWO, KubeLab, pods_of, wait_for_attempt, wait_for_end

pytest.importorskip("paceline.targets.kubernetes", reason="needs the compute target kubernetes")

pytestmark = [pytest.mark.kube, pytest.mark.timeout(1200)]

#: This output is too large to be sent through the pod's log.
LARGE = "import os\nopen('outputs/large', 'wb').write(os.urandom(9 << 20))\n"


@pytest.fixture
def volume(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """The folder of a volume that several nodes can mount. Its claim is `shared`."""
    folder = tmp_path / "volume"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    claim_volume(cluster, "shared", "ReadWriteMany", folder)
    yield folder
    cluster.kubectl("delete", "pvc/shared", "pv/shared", "--ignore-not-found")


def claim_volume(cluster: Cluster, name: str, mode: str, folder: Path) -> None:
    spec = {"accessModes": [mode], "storageClassName": ""}
    about = {"metadata": {"name": name}, "apiVersion": "v1"}
    size = {"storage": "1Gi"}
    cluster.apply(
        {**about, "kind": "PersistentVolume", "spec": {**spec, "capacity": size, "hostPath": {"path": str(folder)}}},
        {
            **about,
            "kind": "PersistentVolumeClaim",
            "spec": {**spec, "volumeName": name, "resources": {"requests": size}},
        },
    )


def test_packages_are_built_once_and_large_outputs_stay_on_the_volume(
    lab: KubeLab, volume: Path, tmp_path: Path
) -> None:
    # Without the right to forward ports, a large file can't be fetched, so it must stay on the volume.
    lab.add(NARROW, volume="shared")
    wheel = str(make_wheel(tmp_path / "wheels", "spam", "1.0"))
    first = lab.submit(f"import spam\n{LARGE}", pip_packages=[wheel])
    assert wait_for_end(first) == "Completed", first.failure
    kept = volume / "runs" / first.id / "outputs" / "large"
    assert kept.stat().st_size == 9 << 20
    assert any(f"They are in runs/{first.id} of the volume shared" in text for text in first.record().warnings)
    built = {path: path.stat().st_mtime_ns for path in volume.glob("environments/*/paceline-environment.json")}
    assert len(built) == 1

    second = lab.submit("import spam", pip_packages=[wheel], **TWO)

    assert wait_for_end(second) == "Completed", second.failure
    assert built == {path: path.stat().st_mtime_ns for path in volume.glob("environments/*/paceline-environment.json")}


def test_evicted_run_of_one_pod_resumes_from_the_checkpoint_on_the_volume(
    cluster: Cluster, lab: KubeLab, volume: Path
) -> None:
    lab.add(volume="shared")
    run = lab.submit(COUNTS, arguments=["50", "2"], max_restarts=1)
    wait_for_attempt(run, 1, ranks=1)

    cluster.evict(pods_of(lab, run)[0])

    assert wait_for_end(run) == "Completed"
    log = run.folder.rank_log(2, 0).read_text()
    assert "attempt 2 goes on from" in log
    assert "attempt 2 goes on from 0" not in log


def test_job_is_refused_if_its_volume_claim_is_missing_or_mounts_on_one_node_only(
    cluster: Cluster, lab: KubeLab, tmp_path: Path
) -> None:
    lab.add(volume="missing")
    with pytest.raises(TargetError, match="has no PersistentVolumeClaim 'missing'"):
        lab.submit("print('never')")
    claim_volume(cluster, "single", "ReadWriteOnce", tmp_path)
    try:
        lab.add(volume="single")
        with pytest.raises(TargetError, match=r"can be mounted on one node \(ReadWriteOnce\), and the job has 2"):
            lab.submit("print('never')", **TWO)
    finally:
        cluster.kubectl("delete", "pvc/single", "pv/single")
