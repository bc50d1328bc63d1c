"""A server in a separate process: its first line, its end, and the same token after a restart."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from paceline.errors import UserError
from paceline.runs.page_address import page_of
from paceline.ui import server
from paceline.ui.config import UiConfig
from paceline.ui.guard import Token
from tests.cli.conftest import Cli
from tests.ui.conftest import Place


def started(config: UiConfig, **options: object) -> tuple[subprocess.Popen[str], dict[str, object]]:
    """A server and the content of its first line."""
    process = subprocess.Popen(  # type: ignore[call-overload]
        [sys.executable, "-m", "paceline.ui", config.to_json()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    line = process.stdout.readline()
    return process, json.loads(line) if line else {}


@pytest.mark.promise("token-stays-owner-s-alone")
@pytest.mark.promise("exit-codes-table-124-time")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_signal_ends_the_ui_server_and_its_token_is_kept(place: Place, number: signal.Signals, code: int) -> None:
    folder = place.run()
    first, said = started(place.config(port=0, as_json=True))
    workspace_dir = folder.path.parents[1]
    try:
        # Other commands find the address of the page by `page_of`.
        assert page_of(workspace_dir) == f"http://127.0.0.1:{said['port']}"
        with httpx.Client(base_url=f"http://127.0.0.1:{said['port']}", follow_redirects=True, timeout=60) as client:
            assert client.get(str(said["url"])).status_code == 200
            assert folder.run_id in client.get("/").text
            # This stream never ends by itself.
            with client.stream("GET", "/live") as stream:
                next(stream.iter_raw())
                first.send_signal(number)
                _, errors = first.communicate(timeout=60)
    finally:
        first.kill()
    assert (first.returncode, errors) == (code, "")
    assert page_of(workspace_dir) is None
    second, again = started(place.config(port=0, as_json=True))
    second.terminate()
    second.communicate(timeout=60)
    assert again["token"] == said["token"]


@pytest.mark.promise("through-ssh-workspace-elsewhere-shown")
def test_ui_server_on_a_socket_ends_with_its_stdin(place: Place, short_path: Path) -> None:
    path = short_path / "ui" / "socket"
    process, said = started(place.config(socket=str(path), as_json=True))
    try:
        assert path.parent.stat().st_mode & 0o077 == 0
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://127.0.0.1:7223", timeout=60) as client:
            assert client.get(f"/?token={said['token']}").status_code == 303
        process.stdin.close()  # type: ignore[union-attr]
        assert process.wait(60) == 0
        assert not path.parent.exists()
    finally:
        process.kill()
        for stream in (process.stdout, process.stderr):
            stream.close()  # type: ignore[union-attr]


def test_second_server_at_a_socket_is_refused_and_a_dead_server_s_socket_is_replaced(
    place: Place, short_path: Path
) -> None:
    """The second server took over the socket, and the end of the first one then removed it."""
    (short_path / "members").write_text("ann = admin\n")
    path = str(short_path / "page" / "socket")
    config = place.config(socket=path, members=str(short_path / "members"), as_json=True)
    first, _ = started(config)
    try:
        with pytest.raises(UserError, match="another server listens there"):
            server._listen_at(path, for_members=True)
        first.kill()
        first.wait(60)
        second, _ = started(config)
        second.terminate()
        second.communicate(timeout=60)
        assert not Path(path).exists()
    finally:
        first.kill()
        first.communicate(timeout=60)


def test_ui_command_prints_the_link_and_refuses_contradictory_options(cli: Cli) -> None:
    process = cli.start("ui", "--port", "0", "--json")
    assert process.stdout is not None
    said = json.loads(process.stdout.readline())
    assert said["url"] == f"http://127.0.0.1:{said['port']}/?token={said['token']}"
    assert said["pid"] == process.pid
    # The server is another program than the command, without the modules of the command line.
    assert "paceline.ui" in Path(f"/proc/{process.pid}/cmdline").read_text()
    assert said["token"] not in Path(f"/proc/{process.pid}/cmdline").read_text()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"--port {port}" in cli("ui", "--port", port, code=2).stderr
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert "--proxy NAME" in cli("ui", "--host", "0.0.0.0", code=2).stderr
    assert "--socket PATH goes with --members FILE" in cli("ui", "--socket", "s", code=2).stderr
    assert "go with --ssh" in cli("ui", "--remote-folder", "x", code=2).stderr
    assert "--proxy does not go with --ssh" in cli("ui", "--ssh", "box", "--proxy", "a", code=2).stderr
    assert "must be a host" in cli("ui", "--ssh=-oProxyCommand=x", code=2).stderr


def test_missing_ui_extra_names_the_install_command(place: Place, tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "uvicorn.py").write_text("raise ImportError('no', name='uvicorn')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "hidden")}
    process, _ = started(place.config(), env=environment)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "pip install 'paceline[ui]'" in errors
    assert "Traceback" not in errors


def test_page_behind_a_proxy_with_a_user_header_prints_the_proxy_s_address(
    place: Place, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the page named an ssh command, although its server accepts only requests of the proxy."""
    (tmp_path / "members").write_text("* = view\n")
    socket_path = str(tmp_path / "page" / "socket")
    config = place.config(
        socket=socket_path, members=str(tmp_path / "members"), user_header="X-User", proxies=("hub.example.org",)
    )
    server._say(config, Token(place.path), 0)
    printed = capsys.readouterr().out
    assert f"for the proxy at {socket_path}:\n\n    https://hub.example.org/..." in printed
    assert "ssh" not in printed
    server._say(dataclasses.replace(config, proxies=()), Token(place.path), 0)
    assert "http://127.0.0.1:PORT/..., at the proxy's PORT. --proxy NAME allows another" in capsys.readouterr().out
