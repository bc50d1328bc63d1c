"""A service on an ssh host: served there, reached from here, updated without a lost request, ended with all of it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.services.record import HEALTHY
from paceline.services.service import Service
from paceline.system import processes
from paceline.targets.configured import Configured, add
from paceline.workspace import Workspace
from tests.engines.hosts import Hosts
from tests.helpers import wait_until, write_tree
from tests.services.conftest import SCRIPT, status_with, supervisors

WHERE = SCRIPT.replace(
    '"pid": os.getpid()', '"host": __import__("socket").gethostname(), "policy": os.sched_getscheduler(0)'
)


@pytest.fixture
def workspace(ssh_network: Hosts, tmp_path: Path) -> Iterator[Workspace]:
    found = Workspace(tmp_path / "ws")
    host = ssh_network.names[0]
    settings = {"hosts": [host], "ssh_config": str(ssh_network.ssh_config), "python": sys.executable}
    add(found.path, Configured(name="lab", kind="ssh", settings=settings))
    yield found
    for service in Service.list(found).values():
        service.delete()
    wait_until(lambda: not ssh_network.processes(host), "nothing runs on the host", 40)
    ssh_network.run(host, ["rm", "-rf", "/tmp/paceline-root/runs"])


@pytest.mark.promise("service-ssh-host-job-slurm")
def test_service_deployed_on_an_ssh_host_answers_requests_until_it_is_stopped(
    ssh_network: Hosts, workspace: Workspace, tmp_path: Path
) -> None:
    source = write_tree(
        tmp_path / "src", {"score.py": WHERE, "two.txt": "2", "three.txt": "3", "bad.py": "import none_such\n"}
    )
    service = Service.deploy(
        workspace, "away", source / "two.txt", entry_script=source / "score.py", target="lab", auth=True
    )
    service.wait_for_deployment(timeout_sec=300)
    host = ssh_network.names[0]
    assert service.run({"x": [1]}) == {"y": [2], "host": host, "policy": os.SCHED_OTHER}
    record = service.record()
    assert str(record.scoring_uri).startswith("http://127.0.0.1:")
    assert f"on {host}" in str(record.note)
    assert workspace.get_run(str(record.run_id)).status == "Running"
    # The key of the service is in no job.json.
    for path in (workspace.path / "runs").rglob("job.json"):
        assert service.get_keys()[0] not in path.read_text()

    answers: list[Any] = []
    failures: list[BaseException] = []
    is_over = threading.Event()

    def ask() -> None:
        # Send a request every 20 ms, so that one is in progress at each update. More requests would slow down the update.
        while not is_over.wait(0.02):
            try:
                answers.append(service.run({"x": [1]})["y"])
            except BaseException as error:
                failures.append(error)

    clients = [threading.Thread(target=ask) for _ in range(3)]
    for each in clients:
        each.start()
    try:
        service.update(source / "three.txt")
        assert service.run({"x": [1]})["y"] == [3]
        with pytest.raises(RuntimeError, match=r"none_such(.|\n)*Revision 2 goes on being served"):
            service.update(entry_script=source / "bad.py")
        # A new key takes effect in a new run of the same revision. No request fails meanwhile.
        served = service.record().run_id
        old, (new, other) = service.get_keys()[0], (service.regen_key("primary"), service.get_keys()[1])
        assert service.run({"x": [1]})["y"] == [3]
        wait_until(lambda: service.record().run_id != served, "another run serves it", 120)
        uri = str(service.scoring_uri)
        assert [status_with(key, uri) for key in (new, other, old)] == [200, 200, 401]
        assert service.record().revision == 2
    finally:
        is_over.set()
        for each in clients:
            each.join()
    assert failures == []
    assert {tuple(each) for each in answers} == {(2.0,), (3.0,)}
    assert workspace.get_run(str(record.run_id)).status in ("Canceled", "Finalizing", "CancelRequested", "Running")

    # If the service's supervisor ends, the next supervisor continues with the same run.
    wait_until(lambda: "POST /score 200" in service.get_logs(), "its log comes back", 60)
    run_id = service.record().run_id
    before = supervisors(service)
    # Kill only the guardian process. Then the supervisor gets SIGTERM and ends, but the run continues.
    os.kill(before[0], signal.SIGKILL)
    wait_until(lambda: not processes.is_alive(before[1]), "the supervisor ends with its guardian", 60)
    wait_until(lambda: service.record().owner["pid"] not in before, "somebody looks after it again", 60)
    assert service.run({"x": [1]})["y"] == [3]
    assert service.state == HEALTHY
    assert service.record().run_id == run_id
    service.stop()
    assert workspace.get_run(str(run_id)).status == "Canceled"
    assert not (service._folder.path / "run.json").exists()
