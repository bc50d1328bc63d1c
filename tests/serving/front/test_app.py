"""Requests from outside: valid and invalid ones at a real server, which goes on after each."""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from paceline.serving.state import read_state
from tests.helpers import wait_until
from tests.serving.servers import ECHO, PATIENCE_S, serving, write_config

LIMIT = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    script = """
    import json
    def init():
        pass
    def run(data):
        return {"size": len(data)}
    """
    with serving(tmp_path_factory.mktemp("front"), script, max_body_bytes=LIMIT) as server:
        yield server
        assert server.score("12").json() == {"size": 2}
        assert server.state["workers"][0]["state"] == "ready"
        assert "Traceback" not in server.log


@contextlib.contextmanager
def connection(server):
    with socket.create_connection(("127.0.0.1", server.state["port"]), timeout=PATIENCE_S) as made:
        yield made


def answer_to(server, data: bytes) -> bytes:
    """All that a server sends until it closes the connection."""
    with connection(server) as made:
        made.sendall(data)
        return read_all(made)


def read_all(made: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := made.recv(65536):
            found += part
    return found


def read_to(made: socket.socket, end: bytes) -> bytes:
    """Return the bytes up to these: head and body may come separately."""
    found = b""
    while end not in found:
        part = made.recv(65536)
        assert part, found
        found += part
    return found


def resident(server) -> int:
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096


def test_body_over_the_limit_is_refused_with_413(server):
    answer = server.score(b"1" * (LIMIT + 1))
    assert answer.status_code == 413
    assert answer.json() == {"message": f"the body has more than {LIMIT} bytes, which is max_body_bytes."}
    assert server.score(b"1" * LIMIT).json() == {"size": LIMIT}


@pytest.mark.promise("whatever-comes-answer-right-status")
def test_body_of_a_gigabyte_is_not_kept_in_memory(server):
    before = resident(server)
    with connection(server) as made:
        made.sendall(b"POST /score HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1073741824\r\n\r\n")
        sent, piece = 0, b"1" * (1 << 20)
        # Send the whole body before reading any answer, until the server closes the connection.
        with contextlib.suppress(ConnectionError):
            while sent < 64 << 20:
                sent += made.send(piece)
        assert b" 413 " in made.recv(65536)
    assert resident(server) - before < 32 << 20


def test_body_without_a_content_length_is_refused_with_413_over_the_size_limit(server):
    def pieces():
        for _ in range(100):
            yield b"1" * (LIMIT // 10)

    with httpx.Client(timeout=PATIENCE_S) as client:
        try:
            status = client.post(f"{server.url}/score", content=pieces()).status_code
        except (httpx.WriteError, httpx.ReadError):
            status = 413  # the server closed the connection during the upload
    assert status == 413


@pytest.mark.promise("whatever-comes-answer-right-status")
def test_gzip_body_is_refused_without_decompression(server):
    bomb = gzip.compress(b"0" * (100 << 20))
    assert len(bomb) < LIMIT
    answer = server.score(bomb, headers={"content-encoding": "gzip"})
    assert answer.status_code == 415
    assert answer.json() == {"message": "content-encoding 'gzip' is not supported. Send the body without encoding."}


@pytest.mark.promise("whatever-comes-answer-right-status")
@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n",
        b"no http at all\r\n\r\n",
        b"POST /score HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /score HTTP/1.1\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n12",
        b"POST /score HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"x%d: y\r\n" % at for at in range(20_000)) + b"\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=["empty", "words", "minus", "two lengths", "chunk", "long path", "many headers", "tls"],
)
def test_invalid_http_request_is_refused(server, data):
    with connection(server) as made:
        with contextlib.suppress(ConnectionError):
            made.sendall(data)
        with contextlib.suppress(OSError):  # the server may have closed the connection already
            made.shutdown(socket.SHUT_WR)
        found = read_all(made)
    assert found == b"" or found.split(b" ")[1][:1] in (b"4", b"2")
    assert server.score("1").status_code == 200


def test_endless_request_head_is_not_kept_in_memory(server):
    before = resident(server)
    with connection(server) as made:
        with contextlib.suppress(ConnectionError):
            made.sendall(b"GET / HTTP/1.1\r\nx: ")
            for _ in range(64):
                made.sendall(b"y" * (1 << 20))
        found = read_all(made)
    assert b" 431 " in found or found == b""  # empty if the connection was reset before the answer was read
    assert resident(server) - before < 32 << 20


def test_incomplete_request_does_not_occupy_a_model_process(server):
    with contextlib.ExitStack() as stack:
        for half in (b"POST /sc", b"POST /score HTTP/1.1\r\ncontent-length: 100\r\n\r\nhalf"):
            made = stack.enter_context(connection(server))
            made.sendall(half)
        assert server.score("1").json() == {"size": 1}


def test_clients_that_disconnect_early_do_not_block_the_server(server):
    for _ in range(20):
        with connection(server) as made:
            made.sendall(b"POST /score HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n\r\n1")
    assert server.score("1").json() == {"size": 1}


def test_pipelined_requests_are_all_answered(server):
    one = b"POST /score HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n\r\n1"
    found = answer_to(server, one * 4 + one.replace(b"host:", b"connection: close\r\nhost:"))
    assert found.count(b'{"size": 1}') == 5


def test_pipelined_requests_before_an_invalid_one_leave_no_traceback(server):
    """The connection was closed while they were in hand, and uvicorn tells the last request of a connection alone."""
    one = b"POST /score HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n\r\n1"
    assert answer_to(server, one * 4 + b"POST /score HTTP/1.1\r\nhost\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    wait_until(lambda: server.log.count(" POST /score 400 ") >= 1, "the request in hand is logged")


@pytest.mark.promise("whatever-comes-answer-right-status")
def test_server_answers_with_many_open_connections(server):
    """As many as this process may open; the server, which may open as many, answers beside them or says that it is full."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 10_000 if hard == resource.RLIM_INFINITY else min(10_000, hard - 1000)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(wanted + 1000, hard)), hard))
    made = []
    try:
        for _ in range(wanted):
            made.append(socket.create_connection(("127.0.0.1", server.state["port"]), timeout=PATIENCE_S))
        # Use the newest connections, because the server closes a connection after 15 s without a request.
        for one in made[-50:]:
            one.sendall(b"POST /score HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n\r\n1")
            assert read_to(one, b'{"size": 1}').startswith(b"HTTP/1.1 200")
        assert server.score("1").status_code == 200
    finally:
        for one in made:
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    "path",
    [
        "/score/../../etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "/v2/models/..%2f..%2f/infer",
        "/score%00",
        "//score",
        "/%0d%0aX:y",
    ],
    ids=range(6),
)
def test_unknown_path_of_the_scoring_server_returns_404(server, path):
    with httpx.Client(timeout=PATIENCE_S) as client:
        request = client.build_request("POST", server.url, content="1")
        request.url = httpx.URL(server.url, raw_path=path.encode())
        assert client.send(request).status_code == 404


def test_clients_can_not_forge_log_lines(server):
    server.client.get("/%0aforged", headers={"x-request-id": "a\tb"})
    answer_to(server, b"GET /\xc3\xa4\x1b[31m HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    deadline = time.monotonic() + PATIENCE_S
    while "%0aforged" not in server.log and time.monotonic() < deadline:
        time.sleep(0.05)
    assert "\nforged" not in server.log
    assert "\x1b" not in server.log


def test_each_request_is_logged_in_a_line_with_its_request_id(server):
    server.score("1", headers={"x-request-id": "my-own-id"})
    deadline = time.monotonic() + PATIENCE_S
    while "my-own-id" not in server.log and time.monotonic() < deadline:
        time.sleep(0.05)
    line = next(line for line in server.log.splitlines() if "my-own-id" in line)
    assert " POST /score 200 11 " in line
    # A refused request is logged too, with the size of its answer.
    refused = server.score("x" * 2_000_000, headers={"x-request-id": "refused-id"})
    while "refused-id" not in server.log and time.monotonic() < deadline:
        time.sleep(0.05)
    line = next(line for line in server.log.splitlines() if "refused-id" in line)
    assert f" POST /score {refused.status_code} {len(refused.content)} " in line


def test_metrics_endpoint_counts_requests(server):
    def value(name: str) -> float:
        text = server.client.get("/metrics").text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    name = 'paceline_requests_total{service="svc",path="/score",status="200"}'
    before = value(name)
    for _ in range(3):
        server.score("1")
    assert value(name) == before + 3
    assert value('paceline_request_seconds_count{service="svc",path="/score"}') >= before + 3
    assert value("paceline_model_processes_ready") == 1
    assert value("paceline_model_process_resident_bytes") > 1 << 20


@pytest.mark.promise("whatever-comes-answer-right-status")
def test_incomplete_request_head_times_out(tmp_path):
    from paceline.serving.front import connections

    code = (
        "import sys\nfrom pathlib import Path\nfrom paceline.serving.front import connections, start\n"
        "connections.HEAD_S = connections.BODY_S = 0.2\nconnections._LOOK_S = 0.05\n"
        "sys.exit(start.run(Path(sys.argv[1])))\n"
    )
    assert connections.HEAD_S > 5
    import subprocess
    import sys

    from paceline.serving.state import read_state
    from tests.serving.servers import ECHO, write_config

    write_config(tmp_path, ECHO)
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "config.json")], cwd=tmp_path) as process:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while (read_state(tmp_path) or {}).get("state") != "ready":
                assert time.monotonic() < deadline
                time.sleep(0.02)
            port = (read_state(tmp_path) or {})["port"]
            for half in (b"", b"POST /sc", b"POST /score HTTP/1.1\r\ncontent-length: 100\r\n\r\nhalf"):
                with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as made:
                    made.sendall(half)
                    assert b" 408 " in read_all(made)

            def answers_twice() -> bool:
                with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as made:
                    # A connection that has had an answer may wait longer for its next request.
                    one = b"POST /score HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n\r\n1"
                    # These exceptions mean that the server has answered 408 and closed the connection.
                    with contextlib.suppress(ConnectionError, AssertionError):
                        for pause_s in (0.6, 0.0):
                            made.sendall(one)
                            read_to(made, b'{"got": 1}')
                            time.sleep(pause_s)
                        return True
                return False

            # Repeat, because a busy machine may stop this process or the server between the connection and the request.
            wait_until(answers_twice, "both requests are answered")
        finally:
            process.terminate()
            assert process.wait(PATIENCE_S) == 0


def test_every_endpoint_of_the_scoring_server_answers_valid_json(server):
    for path in ("/none", "/v2", "/livez", "/readyz", "/swagger.json"):
        json.loads(server.client.get(path).text)


def test_oversized_request_head_returns_431(server):
    """In one piece it is parsed before its size is seen."""
    for head in (b"x: " + b"y" * 100_000, b"\r\n".join(b"x%d: %s" % (at, b"y" * 1000) for at in range(100))):
        data = b"POST /score HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1\r\n" + head + b"\r\n\r\n1"
        assert answer_to(server, data).startswith(b"HTTP/1.1 431 ")
    path = b"GET /score?" + b"a" * 70_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n"
    assert answer_to(server, path).startswith(b"HTTP/1.1 431 ")
    assert server.client.post("/score", content="1", headers={"x": "y" * 60_000}).status_code == 200


@pytest.mark.promise("without-keys-server-127-0")
@pytest.mark.parametrize("host", ["evil.example", "evil.example:5001", "127.0.0.1.evil.example", "[", "10.0.0.1"])
def test_request_with_a_foreign_host_header_is_refused(server, host):
    """DNS rebinding: a page has its own name lead to 127.0.0.1."""
    answer = server.score("1", headers={"host": host})
    assert answer.status_code == 421
    assert answer.json()["message"].startswith(f"this server is not called {host!r}. Call it 127.0.0.1 or localhost")
    assert server.client.get("/metrics", headers={"host": host}).status_code == 421
    assert server.client.get("/livez", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:80", "[::1]:80", "svc.localhost", "127.9.9.9"])
def test_request_with_a_host_header_of_this_machine_is_answered(server, host):
    assert server.score("1", headers={"host": host, "origin": f"http://{host}"}).status_code == 200


@pytest.mark.promise("without-keys-server-127-0")
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://localhost:3000"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=str,
)
def test_request_from_a_page_of_another_site_never_reaches_the_model(server, headers):
    for answer in (server.score("1", headers=headers), server.client.get("/score?x=1", headers=headers)):
        assert answer.status_code == 403
        assert "--allow-origin" in answer.json()["message"]
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.promise("without-keys-server-127-0")
def test_pages_of_an_allowed_origin_can_send_requests_and_read_answers(tmp_path):
    page, asks = {"origin": "https://app.example"}, {"access-control-request-method": "POST"}
    with serving(tmp_path, ECHO, allow_origins=["https://app.example"]) as server:
        answer = server.score("1", headers=page | {"sec-fetch-site": "cross-site"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://app.example")
        wanted = {"access-control-request-headers": "content-type"}
        preflight = server.client.options("/score", headers=page | asks | wanted)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-methods"] == "GET, POST"
        assert preflight.headers["access-control-allow-headers"] == "content-type"
        # This header lets a page of another origin read error responses too.
        assert server.client.get("/none", headers=page).headers["access-control-allow-origin"] == "https://app.example"
        assert server.score("1", headers={"origin": "https://other.example"}).status_code == 403
        server.configure(allow_origins=["*"], revision="2")
        server.wait(lambda state: state["revision"] == "2")
        assert server.score("1", headers={"origin": "null"}).headers["access-control-allow-origin"] == "null"


def test_cross_origin_request_needs_an_api_key_if_api_keys_are_set(tmp_path):
    keys = {"primary": "p" * 32}
    (tmp_path / "keys.json").write_text(json.dumps(keys))
    page = {"origin": "https://app.example", "host": "service.example"}
    bearer = {"authorization": f"Bearer {keys['primary']}"}
    with serving(tmp_path, ECHO, keys_file="keys.json", allow_origins=["https://app.example"]) as server:
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        # A preflight request has no key.
        assert server.client.options("/score", headers=page | asks).status_code == 200
        refused = server.score("1", headers=page)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, "https://app.example")
        assert server.score("1", headers=page | bearer).status_code == 200


def test_incomplete_request_is_logged_as_408(tmp_path):
    """It was logged as 400, or not at all where its head was not whole."""
    impatient = (
        "from paceline.serving.front import connections; connections.HEAD_S = connections.BODY_S = 0.5; "
        "from paceline.serving.front.start import run; import sys, pathlib; sys.exit(run(pathlib.Path(sys.argv[1])))"
    )
    write_config(tmp_path, ECHO)
    with open(tmp_path / "log", "ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", impatient, str(tmp_path / "config.json")], stdout=log, stderr=log, cwd=tmp_path
        )
    try:
        wait_until(lambda: (read_state(tmp_path) or {}).get("state") == "ready", "it is ready")
        port = (read_state(tmp_path) or {})["port"]
        for data in (b"POST /score HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\nhalf", b"POST /sc"):
            with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as made:
                made.sendall(data)
                assert read_all(made).startswith(b"HTTP/1.1 408 ")
    finally:
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    lines = (tmp_path / "log").read_text().splitlines()
    assert sum(" POST /score 408 " in line for line in lines) == 1
    assert sum(" - - 408 " in line for line in lines) == 1
    assert not any(" 400 " in line for line in lines)
