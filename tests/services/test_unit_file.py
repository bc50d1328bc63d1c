"""The systemd unit of a service is valid, and its command keeps the service alive."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from paceline.errors import ServiceError
from paceline.services import store, unit_file
from paceline.services.folder import ServiceFolder
from paceline.services.record import HEALTHY, UNHEALTHY
from paceline.system import processes
from paceline.workspace import Workspace
from tests.helpers import wait_until
from tests.services.conftest import deployed, looking_after


@pytest.mark.promise("systemd-unit-keeps-service-alive")
def test_systemd_unit_takes_over_a_service_when_its_supervisor_has_ended(workspace: Workspace, source: Path) -> None:
    service = deployed(workspace, source)
    folder = service._folder
    lines = dict(line.partition("=")[::2] for line in unit_file.text(folder).splitlines() if "=" in line)
    variables = [
        shlex.split(line.partition("=")[2])[0]
        for line in unit_file.text(folder).splitlines()
        if line[:12] == "Environment="
    ]
    with open(folder.log, "ab") as log:
        unit = subprocess.Popen(
            shlex.split(lines["ExecStart"]),
            env={"PATH": os.environ["PATH"], **dict(each.split("=", 1) for each in variables)},
            cwd=lines["WorkingDirectory"],
            stdout=log,
            stderr=log,
        )
    try:
        # The process that systemd has started waits, because another supervisor already looks after the service.
        wait_until(lambda: len(looking_after(folder)) == 3, "the unit's process is there")
        first = [pid for pid in looking_after(folder) if pid != unit.pid]
        assert len(first) == 2
        # Kill the guardian first, because it would restart its child.
        child = service.record().owner["pid"]
        for pid in sorted(first, key=lambda pid: pid == child):
            processes.send(pid, signal.SIGKILL)
        wait_until(lambda: store.stored(folder).owner["pid"] not in first, "the unit's process takes over")
        wait_until(lambda: store.stored(folder).state == HEALTHY, "it is served again")
        assert service.run({"x": [1]})["y"] == [2]
        # systemd stops a unit with SIGTERM.
        unit.send_signal(signal.SIGTERM)
        assert unit.wait(timeout=120) == 0
        # After `stop`, the unit's process exits with 0, so systemd does not restart it.
        assert service.state in (HEALTHY, UNHEALTHY)
        service.stop()
    finally:
        unit.kill()
        unit.wait()


def test_unit_file_is_valid_with_special_characters_in_the_path(tmp_path: Path) -> None:
    folder = ServiceFolder(tmp_path / 'a 100% "team" $HOME' / "services" / "digits")
    folder.path.mkdir(parents=True)
    text = unit_file.text(folder)
    start = next(line for line in text.splitlines() if line.startswith("ExecStart="))
    assert 'a 100%% \\"team\\" $$HOME/services/digits"' in start
    if (verify := shutil.which("systemd-analyze")) is None:
        pytest.skip("needs systemd-analyze")
    path = tmp_path / unit_file.name(folder)
    path.write_text(text)
    done = subprocess.run([verify, "verify", "--user", str(path)], capture_output=True, text=True, check=False)
    assert "paceline-digits.service:" not in done.stderr


def test_unit_of_a_workspace_whose_path_has_a_line_break_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="no unit can have"):
        unit_file.text(ServiceFolder(tmp_path / "a\nExecStartPre=id" / "services" / "s"))
