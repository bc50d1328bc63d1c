from __future__ import annotations

import socket
import threading

import pytest

from paceline.remote.agent import rsh


@pytest.fixture
def agent(short_path, monkeypatch):
    """A socket in place of the agent's; a variable tells `rsh.py` its path."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_path / "s"))
        listener.listen(1)
        monkeypatch.setenv(rsh.SOCKET_VARIABLE, str(short_path / "s"))
        yield listener


def answer(listener: socket.socket, text: bytes, heard: list[bytes]) -> threading.Thread:
    def serve() -> None:
        asking, _ = listener.accept()
        with asking:
            heard.append(asking.recv(1 << 16))
            asking.sendall(text)

    thread = threading.Thread(target=serve)
    thread.start()
    return thread


def test_rsh_program_prints_the_text_and_exits_with_the_code_that_the_agent_answers(agent, capsys):
    heard: list[bytes] = []
    thread = answer(agent, b'{"code": 7, "text": "no such host"}\n', heard)
    assert rsh.main(["host", "echo", "a b;"]) == 7
    thread.join()
    assert heard == [b'{"host": "host", "command": "echo a b;"}\n']
    assert capsys.readouterr().err == "no such host\n"


def test_remote_shell_exits_with_255_when_its_agent_is_gone(agent, capsys):
    thread = answer(agent, b"", [])
    assert rsh.main(["host", "true"]) == 255
    thread.join()
    assert "the agent of this node is gone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "path", "said"), [(["host"], "/x", "usage"), (["h", "c"], "", "not set"), (["h", "c"], "/x", "can't be")]
)
def test_remote_shell_without_a_command_or_a_working_socket_prints_the_cause_and_exits_with_255(
    argv, path, said, monkeypatch, capsys
):
    monkeypatch.setenv(rsh.SOCKET_VARIABLE, path)
    assert rsh.main(argv) == 255
    assert said in capsys.readouterr().err
