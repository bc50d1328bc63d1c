from __future__ import annotations

import os
import signal
import socket

import pytest

from paceline.system import scratch
from paceline.system.scratch import Scratch
from tests.helpers import start_python

HOLD = """
import sys, time
from paceline.system.scratch import Scratch
folder = Scratch("test", sys.argv[1])
(folder.path / "file").write_text("content")
print(folder.path, flush=True)
time.sleep(60)
"""

EXEC = """
import os, sys
from paceline.system.scratch import Scratch
folder = Scratch("test", sys.argv[1], for_exec=True)
os.execv(sys.executable, [sys.executable, "-c", f"import time; print({str(folder.path)!r}, flush=True); time.sleep(60)"])
"""


@pytest.fixture
def top(tmp_path):
    return str(tmp_path)


def test_temporary_folder_is_private_and_removed_at_the_end_of_the_with_block(top):
    with Scratch("test", top) as path:
        assert path.parent == type(path)(top)
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "file").write_text("content")
    assert os.listdir(top) == []


def test_path_of_a_temporary_folder_is_short_enough_for_a_unix_socket():
    with Scratch("horovodrun-rank-1000") as path, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path / "a-name-of-thirty-characters-xx"))


@pytest.mark.parametrize("program", [HOLD, EXEC], ids=["same program", "program started by exec"])
def test_next_temporary_folder_removes_the_folder_of_a_killed_process(top, program):
    with start_python(program, top) as process:
        path = process.stdout.readline().strip()
        Scratch("other", top).close()
        assert os.listdir(top) == [os.path.basename(path)]  # its process lives
        process.send_signal(signal.SIGKILL)
        process.wait()
    with Scratch("other", top) as other:
        assert os.listdir(top) == [other.name]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who can create files of other users")
def test_abandoned_temporary_folder_of_another_user_stays(tmp_path, top):
    theirs = tmp_path / "paceline-temp-test-theirs"
    theirs.mkdir()
    os.chown(theirs, 65534, 65534)
    scratch.remove_abandoned(top)
    assert theirs.is_dir()


def test_links_and_folders_of_other_programs_stay_beside_a_new_temporary_folder(tmp_path, top):
    (tmp_path / "kept").mkdir()
    (tmp_path / "paceline-temp-link").symlink_to(tmp_path / "kept")
    (tmp_path / "paceline-temp-file").touch()
    Scratch("test", top).close()
    assert sorted(os.listdir(top)) == ["kept", "paceline-temp-file", "paceline-temp-link"]


def test_temporary_folder_is_created_again_if_another_process_removes_it_before_it_is_locked(top, monkeypatch):
    made = []

    def mkdtemp(prefix, dir):
        path = os.path.join(dir, f"{prefix}{len(made)}")
        os.mkdir(path, 0o700)
        made.append(path)
        if len(made) == 1:
            scratch.remove_abandoned(dir)
        return path

    monkeypatch.setattr(scratch.tempfile, "mkdtemp", mkdtemp)
    with Scratch("test", top) as path:
        assert str(path) == made[1]
        assert path.is_dir()
