"""A service as a job of a real Slurm: served on a node, reached from here and by the node's name, gone with its job."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import ServiceError
from paceline.services import client
from paceline.services.record import HEALTHY, STOPPED
from paceline.services.service import Service
from paceline.targets import polling
from paceline.targets.configured import Configured, add
from paceline.workspace import Workspace
from tests.engines.conformance import FRESH_S
from tests.engines.slurm_lab import SlurmLab
from tests.helpers import wait_until, write_tree
from tests.services.conftest import SCRIPT


@pytest.fixture
def workspace(slurm_cluster: SlurmLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    for name, value in slurm_cluster.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(polling, "FRESH_S", FRESH_S)
    found = Workspace(tmp_path / "ws")
    add(found.path, Configured(name="cluster", kind="slurm", settings={"time": "10"}))
    yield found
    for service in Service.list(found).values():
        service.delete()
    try:
        wait_until(lambda: not slurm_cluster.run("squeue", "-h"), "no job is left", 60)
    finally:
        slurm_cluster.settle()


@pytest.mark.promise("service-ssh-host-job-slurm")
def test_service_deployed_as_a_slurm_job_answers_requests_until_it_is_stopped(
    slurm_cluster: SlurmLab, workspace: Workspace, tmp_path: Path
) -> None:
    source = write_tree(tmp_path / "src", {"score.py": SCRIPT, "two.txt": "2", "three.txt": "3"})
    given = {"entry_script": source / "score.py", "target": "cluster"}
    with pytest.raises(ServiceError, match="asks for a key"):
        Service.deploy(workspace, "digits", source / "two.txt", auth=False, **given)
    service = Service.deploy(workspace, "digits", source / "two.txt", **given)
    service.wait_for_deployment(timeout_sec=300)
    assert service.run({"x": [1]})["y"] == [2]
    record = service.record()
    assert record.has_keys
    # Call the service on its node directly, with the same key. This machine can't resolve the node's name, so use the address.
    name, _, port = str(record.note).partition("http://")[2].partition(" ")[0].partition(":")
    node = slurm_cluster.hosts.addresses[name]
    assert client.call(f"http://{node}:{port}/score", {"x": [1]}, key=service.get_keys()[1])["y"] == [2]
    assert service.update(source / "three.txt").revision == 2
    assert service.run({"x": [1]})["y"] == [3]
    # If someone cancels the service's Slurm job, Paceline submits the service again.
    run_id = service.record().run_id
    for job in slurm_cluster.run("squeue", "-h", "-o", "%i").split():
        slurm_cluster.run("scancel", job)
    wait_until(lambda: service.record().restarts > 0, "its end is seen", 90)
    wait_until(lambda: service.state == HEALTHY, "it is served again", 120)
    assert service.record().run_id != run_id
    assert service.run({"x": [1]})["y"] == [3]
    service.stop()
    assert service.state == STOPPED
