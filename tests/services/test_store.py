"""A reader's view of a service without a supervisor, if this reader can't supervise it."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import pytest

from paceline.errors import ServiceNotFoundError
from paceline.services import store
from paceline.services.folder import MARK
from paceline.services.record import FAILED, GONE, HEALTHY, NOT_RESPONDING
from paceline.system import processes
from paceline.system.files import write_json
from paceline.workspace import Workspace
from tests.helpers import wait_until
from tests.services.conftest import deployed, kill_supervisors


def test_service_that_runs_on_another_machine_is_reported_as_not_responding(workspace: Workspace, source: Path) -> None:
    service = deployed(workspace, source)
    folder = service._folder
    kill_supervisors(service)
    wait_until(lambda: not processes.with_variable(MARK, str(folder.path)), "all of it ends")
    own = store.stored(folder)
    write_json(folder.record, dataclasses.replace(own, owner={**own.owner, "host": "elsewhere"}).to_json())
    assert service.state == NOT_RESPONDING
    assert "elsewhere" in str(service.error)
    write_json(folder.record, own.to_json())


@pytest.mark.parametrize("last_look", ["is_held", "take"])
def test_service_deleted_between_two_reads_is_not_found(
    workspace: Workspace, source: Path, monkeypatch: pytest.MonkeyPatch, last_look: str
) -> None:
    service = deployed(workspace, source)
    folder = service._folder
    service.stop()
    # A service has this desired state for a moment before its supervisor ends.
    store.set_desired(folder, state=GONE)

    def gone(*_: object, **__: object) -> bool:
        shutil.rmtree(folder.path)
        return False

    def gone_before(path: Path) -> int | None:
        gone()
        return os.open(path, os.O_RDWR)

    monkeypatch.setattr(store.locks, last_look, gone if last_look == "is_held" else gone_before)
    with pytest.raises(ServiceNotFoundError):
        store.record(folder)


def test_service_whose_supervisor_died_three_times_at_start_is_failed_until_a_manual_start(
    workspace: Workspace, source: Path
) -> None:
    service = deployed(workspace, source)
    folder = service._folder
    kill_supervisors(service)
    wait_until(lambda: not processes.with_variable(MARK, str(folder.path)), "all of it ends")
    record = store.stored(folder)
    write_json(folder.record, dataclasses.replace(record, owner={**record.owner, "starts": 3}).to_json())
    assert service.state == FAILED
    assert "ended 3 times before it could begin" in str(service.error)
    # The supervisor gives up after three failed starts. A start by the user tries again.
    assert service.start().state == HEALTHY
