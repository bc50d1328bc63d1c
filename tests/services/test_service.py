"""Services as a program uses them: deployed, called, changed, ended."""

from __future__ import annotations

import http.client
import json
import os
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from paceline.environments.environment import Environment
from paceline.errors import ModelError, ServiceError, ServiceFailedError, ServiceNotFoundError
from paceline.models.model import Model
from paceline.services import store
from paceline.services.folder import MARK
from paceline.services.record import FAILED, HEALTHY, STOPPED
from paceline.services.service import Service
from paceline.system import processes
from paceline.workspace import Workspace
from tests.environments.wheels import make_wheel
from tests.helpers import wait_until, write_tree
from tests.services.conftest import SCRIPT, deployed, status_with

BROKEN = "def init():\n    raise RuntimeError('no weights')\n\ndef run(data):\n    return 1\n"


@pytest.mark.promise("service-goes-program-ended-called")
def test_service_is_deployed_called_stopped_started_and_deleted(workspace: Workspace, source: Path) -> None:
    service = deployed(workspace, source, workers=2, tags={"team": "blue"}, timeout_s=90)
    assert service.state == HEALTHY
    assert service.run({"x": [1, 2]})["y"] == [2, 4]
    # `run` sends a string unchanged, as the Azure SDK does.
    assert service.run('{"x": [5]}')["y"] == [10]
    assert workspace.services == {"digits": service}
    assert service.tags == {"team": "blue"}
    record = service.record()
    assert (record.revision, record.workers, record.deployed_by) == (
        1,
        2,
        store.revision(service._folder, 1).created_by,
    )
    assert service.scoring_uri == f"http://127.0.0.1:{record.port}/score"
    wait_until(lambda: "POST /score 200" in service.get_logs(), "the request is in the log")
    assert len(service.get_logs(1).splitlines()) == 1
    # Editing the script later does not change the served script.
    (source / "score.py").write_text(BROKEN)
    with pytest.raises(ServiceFailedError, match=r"answered 500: .*`paceline service logs digits`") as error:
        service.run("no JSON")
    assert error.value.status == 500

    folder = service._folder
    service.stop()
    assert service.state == STOPPED
    with pytest.raises(ServiceFailedError, match="paceline service start digits"):
        service.run({})
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", record.port))
    assert processes.with_variable(MARK, str(folder.path)) == []
    assert not folder.server.exists()
    service.stop()  # stopping a second time is no error
    # The service starts at the same port again.
    assert service.start().scoring_uri == record.scoring_uri
    assert service.run({"x": [1]})["y"] == [2]
    service.delete()
    assert not folder.path.exists()
    assert processes.with_variable(MARK, str(folder.path)) == []
    service.delete()
    with pytest.raises(ServiceNotFoundError, match="There is none yet"):
        Service(workspace, "digits")


@pytest.mark.promise("update-rollback-scaling-lose-request")
def test_an_update_a_rollback_and_a_scaling_lose_no_request(workspace: Workspace, source: Path) -> None:
    service = deployed(workspace, source)
    port = service.record().port
    answers: list[tuple[int, Any]] = []
    failures: list[BaseException] = []
    is_over = threading.Event()

    def ask(keeps: bool) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            # Pause between two requests, so that the update gets CPU time.
            while not is_over.wait(0.02):
                connection.request("POST", "/score", json.dumps({"x": [1]}))
                answer = connection.getresponse()
                answers.append((answer.status, json.loads(answer.read()).get("y")))
                if not keeps:
                    connection.close()
        except BaseException as error:
            failures.append(error)
        finally:
            connection.close()

    clients = [threading.Thread(target=ask, args=(number % 2 == 0,)) for number in range(6)]
    for each in clients:
        each.start()
    try:
        assert service.update(source / "three.txt").revision == 2
        # After `update` has returned, no request gets an answer from the old revision.
        assert service.run({"x": [1]})["y"] == [3]
        assert service.scale(2).workers == 2
        (source / "bad.py").write_text(BROKEN)
        with pytest.raises(ServiceFailedError, match=r"no weights.*Revision 2 goes on being served"):
            service.update(entry_script=source / "bad.py")
        assert service.run({"x": [1]})["y"] == [3]
        assert service.rollback().revision == 1
        assert service.run({"x": [1]})["y"] == [2]
    finally:
        is_over.set()
        for each in clients:
            each.join()
    assert failures == []
    assert {status for status, _ in answers} == {200}
    assert {tuple(y) for _, y in answers} == {(2.0,), (3.0,)}
    assert (service.state, service.record().restarts) == (HEALTHY, 0)
    # Scaling does not start the failed revision again.
    assert service.scale(1).revision == 1


def test_service_that_can_not_start_reports_why_and_recovers_by_update(workspace: Workspace, source: Path) -> None:
    (source / "bad.py").write_text(BROKEN)
    service = Service.deploy(workspace, "digits", source / "two.txt", entry_script=source / "bad.py")
    with pytest.raises(ServiceFailedError, match=r"no weights.*bad\.py, line 2, in init.*paceline service logs digits"):
        service.wait_for_deployment(timeout_sec=120)
    assert service.state == FAILED
    assert "no weights" in str(service.error)
    wait_until(lambda: not processes.with_variable(MARK, str(service._folder.path)), "its processes end")
    # Reading the state does not start the service again.
    assert service.state == FAILED
    assert service.update(entry_script=source / "score.py").state == HEALTHY
    assert service.run({"x": [1]})["y"] == [2]


def test_service_reload_uses_the_edited_files(workspace: Workspace, source: Path) -> None:
    service = deployed(workspace, source)
    (source / "score.py").write_text(SCRIPT.replace("factor * x", "factor * x + 100"))
    assert service.reload().revision == 2
    assert service.run({"x": [1]})["y"] == [102]
    # An update of the model keeps the served source, although the script was edited.
    (source / "score.py").write_text(BROKEN)
    assert service.update(source / "three.txt").revision == 3
    assert service.run({"x": [1]})["y"] == [103]


@pytest.mark.promise("keys-file-others-can-read")
def test_service_api_keys_are_created_and_renewed(workspace: Workspace, source: Path) -> None:
    service = deployed(workspace, source, auth=True)
    uri, (primary, secondary) = str(service.scoring_uri), service.get_keys()

    def status(key: str | None) -> int:
        return status_with(key, uri)

    assert [status(key) for key in (primary, secondary, None, "x" * len(primary))] == [200, 200, 401, 401]
    assert service.run({"x": [1]})["y"] == [2]  # `run` finds the key itself
    new = service.regen_key("primary")
    # `run` works at once, whether or not the server has read the new key.
    assert service.run({"x": [1]})["y"] == [2]
    assert service.get_keys() == (new, secondary)
    wait_until(lambda: status(new) == 200, "the new key is good")
    assert [status(primary), status(secondary)] == [401, 200]
    with pytest.raises(ServiceError, match="'primary' and 'secondary'"):
        service.regen_key("third")
    # Other users can't read a file that has a key or may have a secret. No command line and no log has a key.
    for path in (service._folder.keys, service._folder.server_config, service._folder.revision(1).description):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    assert new not in service.get_logs()
    for path in service._folder.path.rglob("*"):
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) & 0o077:
            assert new.encode() not in path.read_bytes(), path


@pytest.mark.promise("model-service-serves-can-t", "model-changed-since-registered-served")
def test_registered_model_is_served_unless_it_was_modified(workspace: Workspace, source: Path) -> None:
    Model.register(workspace, source / "two.txt", "factor")
    second = Model.register(workspace, source / "three.txt", "factor")
    service = Service.deploy(workspace, "digits", "factor:1", entry_script=source / "score.py")
    service.wait_for_deployment(timeout_sec=120)
    assert service.run({"x": [1]})["y"] == [2]
    service.update(second)
    assert service.run({"x": [1]})["y"] == [3]
    assert service.revisions[-1].model_names == ["factor:2"]
    # A served model can't be deleted: each new model process reads its files, so the service would fail once a process dies.
    for stop in (lambda: None, service.stop):
        stop()
        with pytest.raises(ModelError, match="factor:2 is served by 'digits'"):
            second.delete()
    service.start()
    Model.register(workspace, source / "three.txt", "factor").delete()
    [path] = (workspace.path / "models" / "factor" / "1").rglob("two.txt")
    os.chmod(path, 0o644)
    path.write_text("7")
    with pytest.raises(ServiceFailedError, match=r"two\.txt.*Revision 2 goes on"):
        service.rollback()
    assert service.run({"x": [1]})["y"] == [3]


@pytest.mark.promise("service-environment-run-made-model")
def test_service_script_imports_packages_of_the_environment_given_at_deployment(
    workspace: Workspace, source: Path, tmp_path: Path
) -> None:
    wheel = make_wheel(tmp_path / "wheels", "small", "1.1", code="def say():\n    return 'small'\n")
    script = "import sys, small\n\ndef init():\n    pass\n\ndef run(data):\n    return [small.say(), sys.prefix]\n"
    write_tree(source, {"own.py": script})
    environment = Environment(pip_packages=[str(wheel)], layered=True)  # type: ignore[arg-type]
    service = Service.deploy(
        workspace, "digits", source / "two.txt", entry_script=source / "own.py", environment=environment
    )
    service.wait_for_deployment(timeout_sec=300)
    answer: Any = service.run("{}")
    said, prefix = answer
    assert said == "small"
    assert prefix.startswith(str(workspace.path / "environments"))
    # An environment that can't be built is reported, and the served revision goes on.
    missing = Environment(pip_packages=[str(tmp_path / "wheels" / "none-1-py3-none-any.whl")], layered=True)  # type: ignore[arg-type]
    with pytest.raises(ServiceFailedError, match=r"none-1-py3-none-any\.whl"):
        service.update(environment=missing)
    assert service.run("{}")[0] == "small"


def test_environment_variables_of_a_service_reach_its_script_and_are_not_shown(
    workspace: Workspace, source: Path
) -> None:
    write_tree(source, {"own.py": "import os\ndef init(): pass\ndef run(data): return os.environ['TOKEN']\n"})
    service = Service.deploy(
        workspace,
        "digits",
        source / "two.txt",
        entry_script="own.py",
        source_directory=source,
        environment_variables={"TOKEN": "s3cret"},
    )
    service.wait_for_deployment(timeout_sec=120)
    assert service.run("{}") == "s3cret"
    assert "s3cret" not in (service._folder.record.read_text() + service.get_logs())


@pytest.mark.promise("wrong-service-said-before-anything")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "Digits"}, "3 to 32 lower-case letters"),
        ({"name": "../etc"}, "3 to 32 lower-case letters"),
        ({"name": "ab"}, "3 to 32 lower-case letters"),
        ({"models": []}, "a service needs a model"),
        ({"models": "none:1"}, "there is no model 'none'"),
        ({"models": "./none.txt"}, "there is no such file or folder"),
        ({"models": 3}, "3 is not a model"),
        ({"entry_script": "none.py"}, "there is no such file in"),
        ({"entry_script": "src/two.txt"}, "is not a Python file"),
        ({"entry_script": None, "source_directory": "src"}, "without entry_script"),
        ({"entry_script": "../outside.py", "source_directory": "src"}, "lies outside of source_directory"),
        ({"workers": 0}, "whole number from 1 to"),
        ({"workers": True}, "whole number from 1 to"),
        ({"port": 70000}, "port must be"),
        ({"port": "TAKEN"}, "is taken by another program. Name another port, or 0"),
        ({"host": "203.0.113.7"}, "Name an address of this machine"),
        ({"host": "0.0.0.0", "auth": False}, "asks for a key"),
        ({"tls": ("none.pem", "none.key")}, "there is no file 'none.pem'"),
        ({"max_batch": 0}, "max_batch=0 is not a whole number of 1 or more"),
        ({"speed": 3}, "There are max_batch, max_queue"),
        ({"environment": "conda"}, "must be an Environment"),
        ({"environment": Environment(docker_image="python:3.12")}, "paceline package"),
        ({"environment_variables": {"A=B": 1}}, "a name has a character or more, no '='"),
        ({"target": "nowhere"}, "nowhere"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_invalid_deployment_is_refused_and_creates_nothing(
    workspace: Workspace, source: Path, values: dict[str, Any], message: str
) -> None:
    (source.parent / "outside.py").write_text("")
    given: dict[str, Any] = {"name": "digits", "models": source / "two.txt", "entry_script": "src/score.py", **values}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        if given.get("port") == "TAKEN":
            given["port"] = taken.getsockname()[1]
        with pytest.raises(ValueError, match=message):
            Service.deploy(workspace, given.pop("name"), given.pop("models"), **given)
    folder = store.services_dir(workspace.path)
    assert not folder.exists() or list(folder.iterdir()) == []


def test_invalid_update_is_refused_and_changes_nothing(workspace: Workspace, source: Path) -> None:
    service = deployed(workspace, source)
    with pytest.raises(ServiceError, match="paceline service update digits"):
        Service.deploy(workspace, "digits", source / "two.txt", entry_script=source / "score.py")
    with pytest.raises(ServiceError, match="listens at port"):
        Service.deploy(workspace, "digits", source / "two.txt", entry_script="src/score.py", overwrite=True, port=1)
    with pytest.raises(ServiceError, match="nothing to update"):
        service.update()
    with pytest.raises(ServiceError, match="no revision before 1"):
        service.rollback()
    with pytest.raises(ServiceError, match=r"no revision 7\. It has 1"):
        service.rollback(7)
    with pytest.raises(ServiceError, match="asks for no key"):
        service.get_keys()
    with pytest.raises(ServiceError, match="can't be sent as JSON"):
        service.run({"x": float("nan")})
    with pytest.raises(ServiceNotFoundError, match="There are digits"):
        Service(workspace, "letters")
    assert [each.number for each in service.revisions] == [1]
    Service.deploy(
        workspace, "digits", source / "three.txt", entry_script=source / "score.py", overwrite=True
    ).wait_for_deployment(timeout_sec=120)
    assert service.run({"x": [1]})["y"] == [3]
