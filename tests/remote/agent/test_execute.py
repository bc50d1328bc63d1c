"""The server of a command beside a worker on the node; the test plays both sides' files."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.remote.agent import execute
from paceline.system import processes
from paceline.system.files import json_lines, write_json
from tests.helpers import wait_until


class CommandFiles:
    def __init__(self, tmp_path: Path, argv: list[str], terminal: list[int] | None = None) -> None:
        self.folder, self.output = tmp_path / "channel", tmp_path / "exec.jsonl"
        self.folder.mkdir()
        write_json(self.folder / "request.json", {"argv": argv, "terminal": terminal, "term": "xterm"})
        command = [sys.executable, "-I", "-S", execute.__file__, str(self.folder), str(self.output)]
        self.process = subprocess.Popen(command, cwd=tmp_path)
        self._count = 0

    def tell(self, **told: object) -> None:
        write_json(self.folder / f"in_{self._count}.json", told)
        self._count += 1

    def write(self, data: bytes) -> None:
        self.tell(data=base64.b64encode(data).decode())

    def said(self, name: str) -> bytes:
        return b"".join(base64.b64decode(told[name]) for told in json_lines(self.output) if name in told)

    def exit_code(self) -> int:
        """Told once it has ended."""
        assert self.process.wait(60) == 0
        (code,) = [told["exit"] for told in json_lines(self.output) if "exit" in told]
        return int(code)


@pytest.fixture
def serve(tmp_path):
    made: list[CommandFiles] = []

    def start(*argv: str, **values) -> CommandFiles:
        made.append(CommandFiles(tmp_path, list(argv), **values))
        return made[-1]

    yield start
    for channel in made:
        channel.process.kill()
        channel.process.wait()


@pytest.mark.promise("folder-takes-place-request-paceline")
@pytest.mark.parametrize("forge", ["a link", "a link above", "of another user"])
def test_exec_request_folder_of_another_user_or_behind_a_link_is_refused(tmp_path, monkeypatch, forge):
    # Regression: another user replaced the request after the supervisor's check, and so decided which command ran.
    folder = tmp_path / "exec" / "x"
    folder.mkdir(parents=True)
    write_json(folder / "request.json", {"argv": ["id"], "terminal": None, "term": None})
    if forge == "a link":
        folder = folder.with_name("link")
        folder.symlink_to("x")
    elif forge == "a link above":
        (tmp_path / "link").symlink_to("exec")
        folder = tmp_path / "link" / "x"
    else:
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(OSError, match=r"belongs to another user|Not a directory|Too many levels"):
        execute.CommandFiles(str(folder), str(tmp_path / "output"))


def test_stdin_stdout_and_stderr_are_forwarded(serve):
    channel = serve("sh", "-c", "cat; echo wrong >&2; exit 3")
    channel.write(b"one\n")
    channel.write(b"\x00\xff")
    channel.tell(end=True)
    assert channel.exit_code() == 3
    assert (channel.said("out"), channel.said("err")) == (b"one\n\x00\xff", b"wrong\n")


def test_output_buffered_when_the_command_ends_is_still_sent():
    said, ours = [], os.pipe()

    class Slow:
        def say(self, out):
            time.sleep(0.3)
            said.append(base64.b64decode(out))

    reader = execute._Reader(Slow(), ours[0], "out")
    reader.start()
    # The write end stays open, as if the command had left a process behind, so the reader can't see the end of the output.
    os.write(ours[1], bytes(50_000))
    reader.drain()
    assert b"".join(said) == bytes(50_000)
    os.close(ours[1])
    reader.join(60)
    os.close(ours[0])


@pytest.mark.parametrize(("program", "code"), [("no-such-program", 127), ("/", 126)])
def test_exec_of_a_missing_program_exits_with_127_and_of_a_folder_with_126(serve, program, code):
    channel = serve(program)
    assert channel.exit_code() == code
    assert channel.said("err").startswith(f"paceline exec: '{program}': ".encode())


def test_terminal_is_resized_on_request(serve):
    channel = serve("sh", "-c", "stty size; read line; stty size; echo $TERM", terminal=[10, 30])
    wait_until(lambda: b"10 30" in channel.said("out"), "its first size")
    channel.tell(size=[20, 50])
    channel.write(b"\r")
    assert channel.exit_code() == 0
    assert b"20 50" in channel.said("out")
    assert b"xterm" in channel.said("out")


@pytest.mark.parametrize("how", ["told", "folder", "signal"])
def test_disconnected_client_ends_the_command_and_its_children(serve, how):
    # The shell ignores SIGHUP, and so does the process that it starts in another session.
    channel = serve("sh", "-c", "trap '' HUP; setsid sleep 600 & echo $!; wait")
    wait_until(lambda: channel.said("out").endswith(b"\n"), "it runs")
    child = int(channel.said("out"))
    if how == "told":
        channel.tell(gone=True)
    elif how == "folder":
        for path in channel.folder.iterdir():
            path.unlink()
        channel.folder.rmdir()
    else:
        channel.process.terminate()
    assert channel.process.wait(60) == 0
    wait_until(lambda: not processes.is_alive(child), "the child has ended")


def test_command_blocks_while_too_much_of_its_output_is_unread_and_continues_after_a_read(serve, tmp_path):
    channel = serve("sh", "-c", "yes")
    wait_until(lambda: channel.output.exists() and channel.output.stat().st_size > execute._AHEAD_BYTES, "it is full")
    size = channel.output.stat().st_size
    assert size < execute._AHEAD_BYTES + 4 * execute._CHUNK
    channel.tell(read=size)
    wait_until(lambda: channel.output.stat().st_size > size, "it goes on once that was read")
    channel.tell(gone=True)
    assert channel.process.wait(60) == 0
