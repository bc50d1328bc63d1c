"""A server's life: new configurations, keys, certificates, and its end, under load."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from paceline.serving.state import read_state
from paceline.system.processes import is_alive
from tests.serving.load import load
from tests.serving.servers import ECHO, PATIENCE_S, Server, refusal, serving, write_config

VERSIONED = """
import os, time
def init():
    global text
    text = open(os.path.join(os.environ["PACELINE_MODEL_DIR"], "m.txt")).read()
def run(data):
    time.sleep(0.001)
    return text
"""
KEYS = {"primary": "p" * 32, "secondary": "s" * 32}


def model(folder, version: str, text: str | None = None) -> dict:
    path = folder / f"model-{version}"
    path.mkdir(parents=True)
    (path / "m.txt").write_text(text or f"version {version}")
    return {"name": "digits", "version": version, "path": str(path)}


@pytest.mark.promise("update-new-model-more-processes")
def test_an_update_to_a_new_model_loses_no_request(tmp_path):
    with serving(tmp_path, VERSIONED, models=[model(tmp_path, "1")], revision="1", workers=2) as server:
        with load(server, 8) as calls:
            for revision in ("2", "3"):
                calls.wait_for(50)
                server.configure(models=[model(tmp_path, revision)], revision=revision)
                server.wait(lambda state, wanted=revision: state["revision"] == wanted)
                assert server.score("1").json() == f"version {revision}"
            calls.wait_for(50)
        assert set(calls.outcomes) == {200}
        assert set(calls.bodies) == {'"version 1"', '"version 2"', '"version 3"'}
        server.wait(lambda state: [each["revision"] for each in state["workers"]] == ["3", "3"])


def test_model_that_fails_to_load_is_refused_and_the_previous_revision_keeps_serving(tmp_path):
    with serving(tmp_path, VERSIONED, models=[model(tmp_path, "1")], revision="1") as server:
        broken = model(tmp_path, "2")
        os.remove(tmp_path / "model-2" / "m.txt")
        server.configure(models=[broken], revision="2")
        state = server.wait(lambda state: state["refused"])
        assert state["refused"]["revision"] == "2"
        assert state["refused"]["error"].startswith("FileNotFoundError: ")
        assert (state["state"], state["revision"]) == ("ready", "1")
        assert server.score("1").json() == "version 1"
        for changes, said in (
            ({"host": "localhost"}, "host can't change"),
            ({"port": 1}, "port can't change to 1"),
            ({"workers": 0}, "workers=0"),
        ):
            server.configure(models=[broken], **({"host": "127.0.0.1", "port": 0, "workers": 1} | changes))
            server.wait(lambda state, said=said: said in state["refused"]["error"])
        server.configure(models=[model(tmp_path, "3")], revision="3", workers=1)
        server.wait(lambda state: state["revision"] == "3" and state["refused"] is None)
        assert server.score("1").json() == "version 3"


@pytest.mark.promise("update-new-model-more-processes")
def test_process_count_changes_under_load_without_lost_requests(tmp_path):
    with serving(tmp_path, VERSIONED, models=[model(tmp_path, "1")]) as server:
        first = server.state["workers"][0]["pid"]
        with load(server, 8) as calls:
            for count in (3, 1, 2):
                server.configure(workers=count)
                server.wait(
                    lambda state, count=count: [each["state"] for each in state["workers"]] == ["ready"] * count
                )
                calls.wait_for(20)
        assert set(calls.outcomes) == {200}
        assert is_alive(first) or first not in [each["pid"] for each in server.state["workers"]]


@pytest.mark.promise("keys-asked-replaced-while-serves")
def test_api_keys_are_required_and_can_be_replaced_while_serving(tmp_path):
    (tmp_path / "keys.json").write_text(json.dumps(KEYS))
    with serving(tmp_path, ECHO, keys_file="keys.json", host="0.0.0.0") as server:
        client = httpx.Client(base_url=f"http://127.0.0.1:{server.state['port']}", timeout=PATIENCE_S)

        def status(key: str | None, path: str = "/score", kind: str = "Bearer") -> int:
            headers = {} if key is None else {"authorization": f"{kind} {key}"}
            return client.post(path, content="1", headers=headers).status_code

        wrong = client.post("/score", content="1")
        assert (wrong.status_code, wrong.headers["www-authenticate"]) == (401, "Bearer")
        assert wrong.json() == {"message": "the key is missing or wrong. Send `Authorization: Bearer KEY`."}
        assert [status(key) for key in (*KEYS.values(), "x", "x" * 32, "p" * 31)] == [200, 200, 401, 401, 401]
        assert status(KEYS["primary"], kind="Basic") == 401
        assert [client.get(path).status_code for path in ("/", "/livez", "/readyz", "/v2/health/live")] == [200] * 4
        assert [client.get(path).status_code for path in ("/metrics", "/openapi.json", "/none")] == [401] * 3
        (tmp_path / "keys.json").write_text(json.dumps({**KEYS, "primary": "n" * 32}))
        server.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + PATIENCE_S
        while status("n" * 32) != 200:
            assert time.monotonic() < deadline
        assert [status(KEYS["primary"]), status(KEYS["secondary"])] == [401, 200]
        (tmp_path / "keys.json").write_text(json.dumps({"primary": "short"}))
        server.process.send_signal(signal.SIGHUP)
        refused = server.wait(lambda state: state["refused"])["refused"]["error"]
        assert "at least 16 characters" in refused
        assert "short" not in refused
        assert status("n" * 32) == 200
        assert not any(key in server.log for key in (*KEYS.values(), "n" * 32))
        client.close()


def test_tls_certificate_is_reloaded_when_it_changes(tmp_path):
    def certify(name: str) -> None:
        subprocess.run(
            [
                *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
                *("-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"),
                *("-keyout", str(tmp_path / "key.pem"), "-out", str(tmp_path / "cert.pem")),
            ],
            check=True,
            capture_output=True,
        )

    def context():
        import ssl

        return ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))

    certify("first")
    with serving(tmp_path, ECHO, tls_cert="cert.pem", tls_key="key.pem") as server:
        assert server.state["scheme"] == "https"
        with httpx.Client(verify=context(), timeout=PATIENCE_S) as client:
            assert client.post(f"{server.url}/score", content="1").json() == {"got": 1}
        certify("second")
        server.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with httpx.Client(verify=context(), timeout=PATIENCE_S) as client:
                    assert client.post(f"{server.url}/score", content="1").status_code == 200
                break
            except httpx.ConnectError:
                assert time.monotonic() < deadline
    (tmp_path / "key.pem").write_text("no key")
    assert "can't be used together" in refusal(tmp_path)


@pytest.mark.promise("update-new-model-more-processes")
@pytest.mark.parametrize("round", range(2))
def test_sigterm_under_load_loses_no_accepted_request(tmp_path, round):
    with serving(tmp_path, VERSIONED, models=[model(tmp_path, "1")]) as server:
        with load(server, 16) as calls:
            calls.wait_for(100)
            assert server.end() == 0
            for thread in calls._threads:
                thread.join(PATIENCE_S)
        # When the server closes its socket, connections that it has not accepted are reset: at most one for each client.
        reset = calls.outcomes.keys() - {200, "refused"}
        assert reset <= {"ReadError", "WriteError", "RemoteProtocolError"}
        assert sum(calls.outcomes[each] for each in reset) <= 16
        assert calls.outcomes["refused"] == 16
        assert server.state["state"] == "stopped"


def test_sigterm_lets_a_running_request_finish_within_the_drain_time_and_else_fails_it(tmp_path):
    script = """
    import os, time
    def init(): pass
    def run(data):
        while not os.path.exists("go"): time.sleep(0.01)
        return "done"
    """
    for answered in (True, False):
        folder = tmp_path / str(answered)
        with serving(folder, script, drain_s=60 if answered else 0.5) as server:
            found: list[object] = []

            def call(server=server, found=found) -> None:
                try:
                    found.append(server.score("1").json())
                except httpx.HTTPError as error:
                    found.append(error)

            thread = threading.Thread(target=call)
            thread.start()
            server.wait(
                lambda state, server=server: (
                    'running{service="svc"} 1' in httpx.get(f"{server.url}/metrics", timeout=PATIENCE_S).text
                )
            )
            server.process.send_signal(signal.SIGTERM)
            server.wait(lambda state: state["state"] in ("draining", "stopped"))
            if answered:
                (folder / "src" / "go").touch()
            assert server.process.wait(PATIENCE_S) == 0
            thread.join(PATIENCE_S)
            assert len(found) == 1
            wanted = "the model process ended while it had this request: the server ends."
            assert found == ["done" if answered else {"message": wanted}]


@pytest.mark.promise("update-new-model-more-processes")
def test_listening_socket_is_passed_to_another_server_without_a_lost_request(tmp_path):
    """Both inherit it; by SIGUSR1 the first leaves new connections to the second."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        os.set_inheritable(listener.fileno(), True)

        def start(name: str) -> Server:
            folder = tmp_path / name
            folder.mkdir()
            write_config(folder, VERSIONED, models=[model(folder, "1", name)], listen_fd=listener.fileno())
            return Server(folder, pass_fds=[listener.fileno()])

        first = start("first")
        servers = [first]
        try:
            first.wait(lambda state: state.get("state") == "ready")
            with load(first, 8) as calls:
                calls.wait_for(50)
                servers.append(second := start("second"))
                second.wait(lambda state: state.get("state") == "ready")
                first.process.send_signal(signal.SIGUSR1)
                assert first.process.wait(PATIENCE_S) == 0
                calls.wait_for(50)
            assert set(calls.outcomes) == {200}
            assert set(calls.bodies) == {'"first"', '"second"'}
            assert second.end() == 0
        finally:
            for server in servers:
                server.end()


@pytest.mark.promise("model-changed-after-registration-loaded")
def test_model_whose_files_changed_since_its_registration_is_not_loaded(tmp_path):
    import hashlib

    made = model(tmp_path, "1", "the model")
    listed = tmp_path / "hashes"
    listed.write_text(f"{hashlib.sha256(b'the model').hexdigest()}  m.txt\n")
    options = {"script": VERSIONED, "models": [{**made, "hashes": str(listed)}]}
    with serving(tmp_path, **options) as server:
        assert server.score("1").json() == "the model"
        path = tmp_path / "model-1" / "m.txt"
        path.write_text("another!!")
        server.configure(revision="2")
        refused = server.wait(lambda state: state["refused"])["refused"]
        assert "'m.txt' has changed since its registration" in refused["error"]
        # The process that replaces the killed one must not load the changed file.
        os.kill(server.state["workers"][0]["pid"], signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_S
        while "could not load: model digits:1: the file 'm.txt' has changed since its registration" not in server.log:
            assert time.monotonic() < deadline, server.log
            time.sleep(0.02)
        path.write_text("the model")
        assert server.score("1").json() == "the model"
    path.write_text("the modem")
    assert "'m.txt' has changed since its registration" in refusal(tmp_path)
    path.write_text("the model")
    (tmp_path / "model-1" / "more.pkl").touch()
    assert "'more.pkl' is not one of those that were registered" in refusal(tmp_path)
    os.remove(tmp_path / "model-1" / "more.pkl")
    path.unlink()
    assert "'m.txt' can't be read" in refusal(tmp_path)


def test_several_models_are_served_from_one_model_folder(tmp_path):
    script = """
    import os
    def init(): pass
    def run(data):
        root = os.environ["AZUREML_MODEL_DIR"]
        return {name: open(os.path.join(root, name, "1", "m.txt")).read() for name in ("a", "b")}
    """
    models = [{**model(tmp_path / name, "1", f"this is {name}"), "name": name} for name in ("a", "b")]
    with serving(tmp_path, script, models=models) as server:
        assert server.score("1").json() == {"a": "this is a", "b": "this is b"}


def test_serving_on_a_port_in_use_names_the_port(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"can't listen at host='127.0.0.1', port={port}" in refusal(tmp_path, ECHO, port=port)
    assert "not a listening socket" in refusal(tmp_path, ECHO, listen_fd=97)


def test_server_is_live_at_once_and_ready_after_init(tmp_path):
    script = """
    import os, time
    def init():
        while not os.path.exists("go"):
            time.sleep(0.01)
    def run(data):
        return "went"
    """
    with serving(tmp_path, script, ready=False) as server:
        server.wait(lambda state: state.get("port"))
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                assert server.client.get("/livez").status_code == 200
                break
            except httpx.ConnectError:
                assert time.monotonic() < deadline
        assert server.client.get("/readyz").status_code == 503
        early = server.score("1")
        assert (early.status_code, early.headers["retry-after"]) == (503, "1")
        assert early.json() == {"message": "the model is being loaded; come again."}
        (tmp_path / "src" / "go").touch()
        server.wait(lambda state: state["state"] == "ready")
        assert server.score("1").json() == "went"


@pytest.mark.promise("model-s-interpreter-needs-nothing")
def test_script_is_served_by_a_configured_interpreter_that_has_no_packages_installed(tmp_path):
    """The model processes' interpreter needs nothing of Paceline's, and gets nothing of the server's environment."""
    import venv

    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    script = """
    import sys
    def init(): pass
    def run(data):
        try:
            import numpy
        except ImportError:
            return sys.prefix
    """
    with serving(tmp_path, script, python=str(tmp_path / "venv" / "bin" / "python")) as server:
        assert server.score("1").json() == str(tmp_path / "venv")
    assert (read_state(tmp_path) or {})["state"] == "stopped"
    assert sys.prefix != str(tmp_path / "venv")
