"""The page of a remote workspace: an imitated `ssh` runs its command here and forwards the socket."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
from pathlib import Path

import httpx
import pytest

from paceline.ui import ssh
from tests.cli.conftest import Cli
from tests.helpers import write_program

#: This program stands in for ssh: it forwards a port to a socket, and runs its last argument as a shell command.
SSH = """#!%s
import json, os, socket, subprocess, sys, threading
words = sys.argv[1:]
open(os.environ["SEEN"], "w").write(json.dumps(words))
_, port, path = words[words.index("-L") + 1].split(":")
def pump(a, b):
    try:
        while data := a.recv(65536):
            b.sendall(data)
    except OSError:
        pass
    b.close()
def lead():
    listener = socket.create_server(("127.0.0.1", int(port)))
    while True:
        here, _ = listener.accept()
        there = socket.socket(socket.AF_UNIX)
        there.connect(path)
        for pair in ((here, there), (there, here)):
            threading.Thread(target=pump, args=pair, daemon=True).start()
threading.Thread(target=lead, daemon=True).start()
print("Welcome to the host", flush=True)
sys.exit(subprocess.call(["sh", "-c", words[-1]]))
"""


@pytest.mark.promise("through-ssh-workspace-elsewhere-shown")
def test_ui_with_ssh_shows_a_remote_workspace(cli: Cli, tmp_path: Path) -> None:
    write_program(tmp_path / "bin" / "ssh", SSH % sys.executable)
    there = tmp_path / "its folder"
    there.mkdir()
    program = shlex.join(Cli.argv())
    environment = {"PATH": f"{tmp_path / 'bin'}:{cli.environment['PATH']}", "SEEN": str(tmp_path / "seen")}
    process = cli.start(
        *("ui", "--ssh", "me@box", "--remote-folder", there, "--remote-program", program, "--port", "0", "--read-only"),
        env=environment,
    )
    assert process.stdout is not None
    said = process.stdout.readline() + process.stdout.readline() + process.stdout.readline()
    address = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", said)
    assert address, said
    with httpx.Client(follow_redirects=True, timeout=60) as client:
        assert "its folder" in client.get(address[0]).text
    words = json.loads((tmp_path / "seen").read_text())
    assert words[-3:-1] == ["--", "me@box"]
    assert "ExitOnForwardFailure=yes" in words
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130


def test_ssh_host_without_paceline_is_reported(cli: Cli, tmp_path: Path) -> None:
    write_program(tmp_path / "bin" / "ssh", "#!/bin/sh\necho 'sh: paceline: not found' >&2\nexit 127\n")
    done = cli("ui", "--ssh", "box", env={"PATH": f"{tmp_path / 'bin'}:{cli.environment['PATH']}"}, code=2)
    assert "no server started on box" in done.stderr
    assert "--remote-program" in done.stderr


def test_ssh_command_quotes_user_arguments() -> None:
    words = ssh.command("/usr/bin/ssh", "box", "~/a b", "~/venv/bin/paceline", 7223, ["--read-only"], place="00ff")
    assert words[0] == "/usr/bin/ssh"
    assert "127.0.0.1:7223:/tmp/paceline-ui-00ff/socket" in words
    assert words[-1] == (
        "cd ~/'a b' && exec ~/venv/bin/paceline ui --socket /tmp/paceline-ui-00ff/socket --json --read-only"
    )
    assert ssh.command("ssh", "box", "$(x)", "paceline", 1, [], place="0")[-1].startswith(
        "cd '$(x)' && exec paceline ui"
    )


def test_token_of_a_remote_server_is_taken_only_from_a_valid_json_line_of_its_output() -> None:
    assert ssh._token_of(["hello\n", '{"other": 1}\n', '{"token": "' + "a" * 43 + '"}\n']) == "a" * 43
    assert ssh._token_of(['{"token": "\\u001b]0;x"}\n']) is None
