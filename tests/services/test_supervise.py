"""A service goes on after any process is killed, and it can be ended in any state."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.environments.environment import Environment
from paceline.errors import ServiceError, ServiceFailedError
from paceline.services import load, store
from paceline.services.folder import MARK
from paceline.services.record import HEALTHY, STOPPED, UNHEALTHY
from paceline.services.service import Service
from paceline.system import processes
from paceline.workspace import Workspace
from tests.engines.packages import make_source
from tests.helpers import replace_lock, wait_until
from tests.services.conftest import deployed, kill_supervisors, supervisors


@pytest.mark.promise("service-goes-whatever-killed-same")
def test_killed_server_is_restarted_and_the_service_record_has_the_signal(workspace: Workspace, source: Path) -> None:
    service = deployed(workspace, source)
    before = service.record()
    os.kill(_server_pid(service), signal.SIGKILL)
    wait_until(lambda: service.record().restarts == 1, "its death is seen")
    wait_until(lambda: service.state == HEALTHY, "it is served again")
    after = service.record()
    assert after.server_pid != before.server_pid
    assert "killed by SIGKILL" in str(after.last_end)
    assert after.port == before.port
    assert service.run({"x": [1]})["y"] == [2]


#: This program starts a guardian with shorter time limits.
IMPATIENT = """
import sys
from paceline.services import load, server
from paceline.services.__main__ import main

server.SILENT_S, load.HISTORY_S = 3.0, 0.5
sys.exit(main(sys.argv[1:]))
"""


@contextlib.contextmanager
def _impatient_guardian(service: Service) -> Iterator[subprocess.Popen[bytes]]:
    """Replace the supervisors of a service by an impatient one."""
    folder, first = service._folder, supervisors(service)
    with open(folder.log, "ab") as log:
        guardian = subprocess.Popen(
            [sys.executable, "-c", IMPATIENT, str(folder.path)],
            env={**os.environ, processes.SUPERVISOR_VARIABLE: folder.name},
            cwd=folder.path,
            stdout=log,
            stderr=log,
        )
    try:
        for pid in first:
            processes.send(pid, signal.SIGKILL)
        wait_until(lambda: store.stored(folder).owner["pid"] not in first, "the other one takes over")
        wait_until(lambda: store.stored(folder).server_pid is not None and _answers(service), "it is served again")
        yield guardian
    finally:
        guardian.kill()
        guardian.wait()


@pytest.mark.promise("server-hangs-killed-started-again")
def test_hanging_server_is_killed_and_restarted(workspace: Workspace, source: Path) -> None:
    """Regression: if the server hung while its model processes still ran, it answered no request, and nothing restarted
    it."""
    service = deployed(workspace, source)
    folder = service._folder
    with _impatient_guardian(service) as guardian:
        # A slow model process does not make the server count as hanging. Wait, because a busy machine may stop the server
        # itself.
        wait_until(lambda: _answers(service, sleep=4), "a slow request is answered")
        wait_until(lambda: store.stored(folder).state == HEALTHY, "its server is there")
        before = store.stored(folder)
        os.kill(_server_pid(service), signal.SIGSTOP)
        wait_until(lambda: store.stored(folder).restarts > before.restarts, "its silence is noticed")
        assert "the server hung" in str(store.stored(folder).last_end)
        wait_until(lambda: store.stored(folder).server_pid not in (None, before.server_pid), "another one is there")
        wait_until(lambda: _answers(service), "it is served again")
        service.stop()
        assert guardian.wait(timeout=120) == 0


def test_load_history_of_a_service_is_recorded_even_if_no_page_shows_it(workspace: Workspace, source: Path) -> None:
    service = deployed(workspace, source)
    with _impatient_guardian(service) as guardian:

        def is_recorded() -> bool:
            return _answers(service) and any(
                point["requests_per_s"] and point["p50_ms"] for point in load.read_history(service._folder)
            )

        wait_until(is_recorded, "the requests are in the history")
        service.stop()
        assert guardian.wait(timeout=120) == 0
    # The load history is still there after the service has stopped.
    assert load.ServiceLoad(service._folder).points(service.record())


def test_killed_model_process_is_replaced_while_the_server_continues(workspace: Workspace, source: Path) -> None:
    service = deployed(workspace, source, workers=2)
    before = service.record()
    os.kill(service.run({"x": []})["pid"], signal.SIGKILL)
    # The request in the killed process gets 502. The other model process answers all other requests.
    wait_until(lambda: _answers(service), "it answers")
    assert service.record().server_pid == before.server_pid
    assert service.record().restarts == 0


@pytest.mark.promise("service-goes-whatever-killed-same")
def test_killed_service_supervisor_is_restarted_without_a_refused_request(
    workspace: Workspace, source: Path, tmp_path: Path
) -> None:
    service = deployed(workspace, source)
    _, child = supervisors(service)
    slow: list[object] = []
    go_on = tmp_path / "go_on"
    thread = threading.Thread(target=lambda: slow.append(service.run({"x": [1], "until": str(go_on)})["y"]))
    thread.start()
    try:
        wait_until(lambda: _is_busy(service), "a request is in hand")
        os.kill(child, signal.SIGKILL)
    finally:
        go_on.touch()
    # The service has answered the request that was in progress.
    thread.join()
    assert slow == [[2.0]]
    wait_until(lambda: service.record().owner["pid"] != child, "another one looks after it")
    wait_until(lambda: service.record().server_pid is not None and _answers(service), "it is served again")
    assert service.run({"x": [1]})["y"] == [2]
    assert len(supervisors(service)) == 2


@pytest.mark.promise("while-killed-service-started-again")
@pytest.mark.parametrize("killed", ["server", "supervisor", "both"])
def test_clients_wait_at_the_socket_while_a_killed_service_is_started_again(
    workspace: Workspace, source: Path, killed: str
) -> None:
    """They were answered 503 while the next server loaded its model."""
    script = source / "score.py"
    script.write_text(script.read_text().replace("def init():", "def init():\n    import time\n    time.sleep(1)", 1))
    service = deployed(workspace, source)
    before = service.record()
    _, child = supervisors(service)
    for pid in ([] if killed == "supervisor" else [before.server_pid]) + ([] if killed == "server" else [child]):
        os.kill(pid or 0, signal.SIGKILL)
    # Connections that the killed server had accepted are lost with it, so wait for its end.
    if killed != "supervisor":
        wait_until(lambda: not processes.is_alive(before.server_pid or 0), "the server is gone")
    answers = []
    with ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            answers += [threads.submit(_status, service) for _ in range(4)]
            time.sleep(0.3)
        found = [answer.result() for answer in answers]
    assert found == [200] * len(found)
    wait_until(lambda: service.record().server_pid not in (None, before.server_pid), "another server answers")


@pytest.mark.promise("service-goes-whatever-killed-same")
def test_service_whose_processes_were_all_killed_is_restarted_when_its_state_is_read(
    workspace: Workspace, source: Path
) -> None:
    service = deployed(workspace, source)
    folder, port = service._folder, service.record().port
    kill_supervisors(service)
    # The server ends with its supervisors, so no process is left without a supervisor.
    wait_until(lambda: not processes.with_variable(MARK, str(folder.path)), "the server ends")
    assert store.stored(folder).state == HEALTHY
    service.state  # noqa: B018 - a look
    wait_until(lambda: _answers(service), "it is served again")
    assert service.record().port == port
    assert service.run({"x": [1]})["y"] == [2]


@pytest.mark.promise("service-goes-whatever-killed-same")
def test_suspended_service_excludes_a_second_one_until_its_lock_is_lost(workspace: Workspace, source: Path) -> None:
    service = deployed(workspace, source)
    folder, before = service._folder, supervisors(service)
    owner = store.stored(folder).owner
    for pid in before:
        os.kill(pid, signal.SIGSTOP)
    variables = {**os.environ, processes.SUPERVISOR_VARIABLE: folder.name}
    unit = subprocess.Popen([sys.executable, "-m", "paceline.services", folder.path], env=variables)  # as systemd does
    try:
        assert service.state == HEALTHY  # reading the state starts no second supervisor
        assert store.stored(folder).owner == owner
        replace_lock(folder.lock)
        wait_until(lambda: store.stored(folder).owner != owner or store.stored(folder).failure, "another one works")
    finally:
        for pid in before:
            os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not any(map(processes.is_alive, before)), "the former ones have ended")
    wait_until(lambda: _answers(service), "it is served again")
    assert store.stored(folder).owner["pid"] not in before
    service.delete()
    unit.wait(60)


#: This program is a guardian to which a method's call comes after another process has claimed the service.
FORMER = """
import sys
from pathlib import Path
from paceline.runs.claim import Claim
from paceline.services.__main__ import Guardian
from paceline.services.folder import ServiceFolder
from paceline.system import locks

folder = ServiceFolder(Path(sys.argv[1]))
guardian = Guardian(folder, Claim.take(folder.lock, None))
locks.claim(locks.opened(folder.lock))
getattr(guardian, sys.argv[2])()
"""


@pytest.mark.parametrize("method", ["_clear", "_listener"])
def test_guardian_whose_service_was_taken_over_kills_no_process_and_writes_no_record(
    tmp_path: Path, method: str
) -> None:
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: str(tmp_path)})
    try:
        done = subprocess.run([sys.executable, "-c", FORMER, str(tmp_path), method], check=False, timeout=60)
        assert (done.returncode, processes.is_alive(other.pid)) == (75, True)
        assert os.listdir(tmp_path) == ["supervisor.lock"]
    finally:
        other.kill()
        other.wait()


def test_crashing_server_restarts_with_backoff_until_an_update(workspace: Workspace, source: Path) -> None:
    service = deployed(workspace, source)
    [model] = service._folder.revision(1).model(0).iterdir()
    model.unlink()
    os.kill(_server_pid(service), signal.SIGKILL)
    wait_until(lambda: service.record().restarts > 1, "it is tried more than once")
    record = service.record()
    assert record.state == UNHEALTHY
    assert record.failure
    assert service.update(source / "three.txt").state == HEALTHY
    assert service.run({"x": [1]})["y"] == [3]
    assert service.error is None


def test_environment_build_is_aborted_by_an_update_or_the_end_of_the_service(
    workspace: Workspace, source: Path, tmp_path: Path
) -> None:
    service = deployed(workspace, source)
    slow = tmp_path / "slow"
    package = make_source(slow, "slowpoke")
    (slow / "hold").touch()
    environment = Environment(pip_packages=[str(package)], layered=True)  # type: ignore[arg-type]
    service.update(environment=environment, wait=False)
    wait_until((slow / "started").exists, "the build is on its way", 120)
    # The served revision goes on during the build.
    assert service.run({"x": [1]})["y"] == [2]
    assert service.record().updating == 2
    assert service.rollback(1).updating is None
    wait_until(lambda: not _mentions(str(slow)), "the build has ended")
    (slow / "started").unlink()
    service.update(environment=environment, wait=False)
    wait_until((slow / "started").exists, "the build is on its way again", 120)
    service.stop()
    assert service.state == STOPPED
    wait_until(lambda: not _mentions(str(slow)), "the build has ended")


def test_service_deleted_right_after_deployment_leaves_no_processes_or_files(
    workspace: Workspace, source: Path
) -> None:
    service = Service.deploy(workspace, "digits", source / "two.txt", entry_script=source / "score.py")
    service.delete()
    assert not service._folder.path.exists()
    assert processes.with_variable(MARK, str(service._folder.path)) == []
    assert list(store.services_dir(workspace.path).iterdir()) == []


def test_service_on_an_occupied_port_reports_the_port_and_starts_when_it_is_free(
    workspace: Workspace, source: Path
) -> None:
    import socket

    service = deployed(workspace, source)
    port = service.record().port
    service.stop()
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        taken.listen()
        service.start(wait=False)
        wait_until(lambda: "is taken by another program" in str(service.error), "the port is named")
        assert service.state == UNHEALTHY
    wait_until(lambda: service.state == HEALTHY, "it has the port")
    assert service.run({"x": [1]})["y"] == [2]


def test_deployment_timeout_reports_the_state(workspace: Workspace, source: Path) -> None:
    (source / "slow.py").write_text("import time\ndef init(): time.sleep(600)\ndef run(data): return 1\n")
    service = Service.deploy(workspace, "digits", source / "two.txt", entry_script=source / "slow.py")
    with pytest.raises(ServiceFailedError, match=r"is Transitioning after 0\.2 s; it goes on"):
        service.wait_for_deployment(timeout_sec=0.2)
    # `delete` does not wait for a loading that hangs.
    began = time.monotonic()
    service.delete()
    assert time.monotonic() - began < 300


def _server_pid(service: Service) -> int:
    pid = service.record().server_pid
    assert pid, "no server: os.kill(0) would signal the tests themselves"
    return pid


def _answers(service: Service, sleep: float = 0) -> bool:
    try:
        return bool(service.run({"x": [1], "sleep": sleep})["y"] == [2])
    except (ServiceFailedError, ConnectionError):
        return False


def _status(service: Service) -> int:
    """The status of a request by a connection of its own."""
    try:
        service.run({"x": [1]})
    except ServiceFailedError as error:
        return error.status or 0
    return 200


def _is_busy(service: Service) -> bool:
    """True once a client's connection to the service is there."""
    port = service.record().port
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


def _mentions(text: str) -> list[bytes]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if text.encode() in line:
                found.append(line)
    return found


def _told(path: Path) -> list[str]:
    return re.findall(r'"event": "failure", "state": "(\w+)"', path.read_text() if path.exists() else "")


@pytest.mark.promise("service-down-told-once")
def test_notification_is_sent_once_when_restarts_do_not_recover_a_service(
    workspace: Workspace, source: Path, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    service = deployed(workspace, source, notify=f"command:tee -a {told}")
    for deaths in range(1, 5):
        wait_until(lambda: service.state == HEALTHY, "it is served again")
        os.kill(_server_pid(service), signal.SIGKILL)
        wait_until(lambda deaths=deaths: service.record().restarts == deaths, "its death is seen")
        if deaths == 2:
            assert _told(told) == []
    wait_until(lambda: _told(told), "its receiver has heard")
    wait_until(lambda: service.state == HEALTHY, "it is served again")
    assert _told(told) == [UNHEALTHY]
    assert "killed by SIGKILL" in told.read_text()


@pytest.mark.promise("service-down-told-once")
def test_notification_is_sent_when_the_first_revision_of_a_service_fails(
    workspace: Workspace, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "score.py").write_text("def init():\n    raise ValueError('bad weights')\n\ndef run(data):\n    pass\n")
    with pytest.raises(ServiceError, match=r"notify='slack:env:HOOK'.*HOOK"):
        deployed(workspace, source, notify="slack:env:HOOK")
    monkeypatch.setenv("HOOK", "http://127.0.0.1:1/hidden")
    with pytest.raises(ServiceFailedError, match="bad weights"):
        deployed(workspace, source, notify=[f"command:tee -a {tmp_path}/told", "slack:env:HOOK"])
    folder = store.folder_of(workspace.path, "digits")
    wait_until(lambda: "no message to slack" in folder.log.read_text(), "the other receiver's failure is in the log")
    assert _told(tmp_path / "told") == ["Failed"]
    assert "bad weights" in (tmp_path / "told").read_text()
    assert "hidden" not in folder.log.read_text()
    assert folder.receivers.stat().st_mode & 0o077 == 0
