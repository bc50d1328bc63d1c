"""A workspace whose services end with the test."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.services import store
from paceline.services.folder import MARK, ServiceFolder
from paceline.services.service import Service
from paceline.system import processes
from paceline.workspace import Workspace
from tests.helpers import free_port as find_free_port
from tests.helpers import wait_until, write_tree

SCRIPT = """
import json, os, pathlib, time

def init():
    global factor
    [path] = pathlib.Path(os.environ["AZUREML_MODEL_DIR"]).iterdir()
    factor = float(path.read_text())

def run(data):
    asked = json.loads(data)
    time.sleep(asked.get("sleep", 0))
    while "until" in asked and not os.path.exists(asked["until"]):
        time.sleep(0.02)
    return {"y": [factor * x for x in asked.get("x", ())], "pid": os.getpid()}
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """score.py and two models, which multiply by 2 and by 3."""
    return write_tree(tmp_path / "src", {"score.py": SCRIPT, "two.txt": "2", "three.txt": "3"})


@pytest.fixture
def workspace(tmp_path: Path) -> Iterator[Workspace]:
    found = Workspace(tmp_path / "ws")
    yield found
    for folder in store.all_folders(found.path):
        Service(found, folder.name).delete()
        assert not folder.path.exists()
        assert processes.with_variable(MARK, str(folder.path)) == []
        assert looking_after(folder) == []


def deployed(
    workspace: Workspace, source: Path, name: str = "digits", model: str = "two.txt", **more: object
) -> Service:
    """A service that answers."""
    service = Service.deploy(
        workspace,
        name,
        source / model,
        entry_script=source / "score.py",
        **more,  # type: ignore[arg-type]
    )
    service.wait_for_deployment(timeout_sec=120)
    return service


def looking_after(folder: ServiceFolder) -> list[int]:
    """The processes that look after the service of this folder: others of its name may run elsewhere."""
    found = []
    for pid in processes.with_variable(processes.SUPERVISOR_VARIABLE, folder.name):
        try:
            if os.fsencode(folder.path) in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def supervisors(service: Service) -> list[int]:
    """The guardian and its child, in this order."""
    folder = store.folder_of(service.workspace.path, service.name)
    wait_until(lambda: len(looking_after(folder)) == 2, "two processes that look after the service")
    child = service.record().owner["pid"]
    return sorted(looking_after(folder), key=lambda pid: pid == child)


def kill_supervisors(service: Service) -> None:
    """Kill the guardian and its child, which may end by itself as soon as the guardian is gone."""
    for pid in supervisors(service):
        processes.send(pid, signal.SIGKILL)


@pytest.fixture
def free_port() -> int:
    """Return a port of this machine on which no process listens."""
    return find_free_port()


def status_with(key: str | None, uri: str) -> int:
    """The status by which a service answers a request with this key."""
    request = urllib.request.Request(uri, b'{"x": []}', {"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
