from __future__ import annotations

import os
import signal
import subprocess
import threading

import pytest

from paceline import locks
from tests.helpers import start_python, wait_until

HOLD = """
import sys, time
from pathlib import Path
from paceline import locks
print(locks.take(Path(sys.argv[1])) is not None, flush=True)
time.sleep(60)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lock"


def test_a_lock_that_nobody_made_is_not_held(path):
    assert not locks.is_held(path)
    assert not path.exists()


def test_a_taken_lock_is_held_until_it_is_closed(path):
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


def test_of_two_processes_one_gets_it(path):
    with start_python(HOLD, path) as one:
        assert one.stdout.readline() == "True\n"
        with start_python(HOLD, path) as other:
            assert other.stdout.readline() == "False\n"
            other.kill()
        one.kill()


def test_a_child_that_it_is_handed_to_keeps_it(path):
    fd = locks.take(path)
    child = subprocess.Popen(["sleep", "60"], pass_fds=(fd,))
    os.close(fd)
    try:
        assert locks.is_held(path)
    finally:
        child.kill()
        child.wait()
    assert not locks.is_held(path)


def test_a_program_that_is_started_meanwhile_does_not_keep_it(path):
    fd = locks.take(path)
    child = subprocess.Popen(["sleep", "60"], close_fds=False)
    os.close(fd)
    try:
        wait_until(lambda: not locks.is_held(path), "the lock to be free once the program runs")
    finally:
        child.kill()
        child.wait()


def test_readers_do_not_take_each_other_for_the_holder(path):
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
