from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading

import pytest

from paceline.system import lock_holder, locks
from tests.helpers import start_python, wait_until

HOLD = """
import sys, time
from pathlib import Path
from paceline.system import locks
print(locks.take(Path(sys.argv[1])) is not None, flush=True)
time.sleep(60)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lock"


def test_missing_lock_file_is_reported_as_not_held(path):
    assert not locks.is_held(path)
    assert not path.exists()


def test_lock_is_held_until_its_descriptor_closes(path):
    fd = locks.take(path)
    assert locks.is_held(path)
    assert locks.take(path) is None
    os.close(fd)
    assert not locks.is_held(path)
    again = locks.take(path)
    assert again is not None
    os.close(again)


def test_the_lock_of_a_killed_process_is_free(path):
    with start_python(HOLD, path) as process:
        assert process.stdout.readline() == "True\n"
        assert locks.is_held(path)
        assert locks.take(path) is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not locks.is_held(path)


def test_second_process_does_not_get_a_held_lock(path):
    with start_python(HOLD, path) as one:
        assert one.stdout.readline() == "True\n"
        with start_python(HOLD, path) as other:
            assert other.stdout.readline() == "False\n"
            other.kill()
        one.kill()


def test_lock_is_held_while_a_child_process_has_inherited_its_descriptor(path):
    fd = locks.take(path)
    child = subprocess.Popen(["sleep", "60"], pass_fds=(fd,))
    os.close(fd)
    try:
        assert locks.is_held(path)
    finally:
        child.kill()
        child.wait()
    assert not locks.is_held(path)


def test_child_process_that_does_not_inherit_the_descriptor_does_not_hold_the_lock(path):
    fd = locks.take(path)
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    os.close(fd)
    try:
        wait_until(lambda: not locks.is_held(path), "the lock to be free once the program runs")
    finally:
        child.kill()
        child.wait()


def test_concurrent_checks_of_a_free_lock_all_report_it_as_free(path):
    os.close(locks.take(path))
    answers: set[bool] = set()
    readers = [
        threading.Thread(target=lambda: answers.update(locks.is_held(path) for _ in range(300))) for _ in range(8)
    ]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert answers == {False}


def test_claim_that_another_process_replaces_at_once_is_not_taken_for_the_own_claim(path, monkeypatch):
    fd = locks.take(path)
    write = os.pwrite

    def write_both(fd: int, text: bytes, at: int) -> int:
        write(fd, text, at)
        return write(fd, b"f" * len(text), at)

    monkeypatch.setattr(os, "pwrite", write_both)
    assert locks.claim(fd).startswith(f"process {os.getpid()} on ".encode())
    assert locks.claimed(path).startswith(b"fff")
    os.close(fd)


def test_later_claim_to_a_lock_replaces_the_earlier_one_also_on_a_full_disk(path, monkeypatch):
    fd = locks.take(path)
    claim = locks.claim(fd)
    assert claim.startswith(f"process {os.getpid()} on ".encode())
    assert locks.claimed(path) == claim
    assert locks.claim(fd) == locks.claimed(path) != claim

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", refuse)
    assert locks.claim(fd) == locks.claimed(path) == b""
    os.close(fd)
    path.unlink()
    assert locks.claimed(path) is None


# --- Lock files of other users


def test_lock_file_is_group_writable_only_if_its_folder_is(tmp_path):
    # Regression: every user could open the lock file, and so could hold the lock. So another user could let a dead run
    # appear as Running.
    for mode, expected in ((0o755, 0o600), (0o777, 0o660), (0o2775, 0o660), (0o700, 0o600)):
        folder = tmp_path / f"{mode:o}"
        folder.mkdir()
        folder.chmod(mode)
        for name, made in (("taken", locks.take), ("locked", locks.locked), ("shared", locks.shared)):
            previous = os.umask(0)
            try:
                if made is locks.take:
                    os.close(made(folder / name))
                else:
                    with made(folder / name):
                        pass
            finally:
                os.umask(previous)
            assert (folder / name).stat().st_mode & 0o7777 == expected, (oct(mode), name)


IS_HELD = """
import os, sys
from pathlib import Path
from paceline.system import locks
os.setgid(65534); os.setuid(65534)
print(locks.is_held(Path(sys.argv[1])), locks.is_held(Path(sys.argv[1]), here=False))
print(locks.take(Path(sys.argv[1])))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be two users")
def test_unreadable_lock_reports_whether_it_is_held(tmp_path):
    os.chmod(tmp_path, 0o755)
    fd = os.open(tmp_path, os.O_RDONLY)  # other users can't enter the folders above
    path = tmp_path / "lock"
    taken = locks.take(path)
    try:
        for held, expected in ((True, "True True\nNone\n"), (False, "False True\nNone\n")):
            if not held:
                os.close(taken)
            done = subprocess.run(
                [sys.executable, "-c", IS_HELD, f"/proc/self/fd/{fd}/lock"],
                pass_fds=[fd],
                capture_output=True,
                text=True,
                check=False,
                cwd="/",
                env={"PYTHONPATH": os.pathsep.join(sys.path)},
            )
            assert done.stdout == expected, done.stderr
    finally:
        os.close(fd)


def test_lock_timeout_names_the_holder(path):
    with start_python(HOLD, path) as process:
        assert process.stdout.readline() == "True\n"
        with pytest.raises(locks.LockHeldError) as caught, locks.locked(path, patience_s=0.05):
            pass
        process.kill()
    text = str(caught.value)
    assert text.startswith(f"process {process.pid} (")
    assert f"has held the lock {str(path)!r} for 0.05 s" in text
    assert "of user " in text
    process.wait()
    with locks.locked(path, patience_s=60):
        assert "process" in lock_holder.holder(path)
