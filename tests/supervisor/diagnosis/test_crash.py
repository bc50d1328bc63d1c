"""What Python writes of a crash, and what of it a report tells."""

from __future__ import annotations

import subprocess
import sys

from paceline.supervisor.diagnosis.crash import crash_stack

CRASH = """
import ctypes, threading, time
def waits():
    time.sleep(60)
def crashes(depth):
    return ctypes.string_at(0) if depth == 0 else crashes(depth - 1)
threading.Thread(target=waits, daemon=True).start()
print("step 1", flush=True)
crashes(%d)
"""


def crashed(depth):
    words = [sys.executable, "-X", "faulthandler", "-c", CRASH % depth]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return (done.stdout + done.stderr).splitlines()


def test_the_calls_of_the_thread_that_crashed_are_told_innermost_first():
    lines = crashed(1)
    assert any("in waits" in line for line in lines)
    error, thread, *calls = crash_stack(lines).splitlines()
    assert error == "Fatal Python error: Segmentation fault"
    assert thread.startswith("Current thread ")
    assert [call.rpartition(" in ")[2] for call in calls] == ["string_at", "crashes", "crashes", "<module>"]


def test_of_a_deep_recursion_the_innermost_calls_are_told():
    assert len(crash_stack(crashed(50)).splitlines()) == 17


def test_the_calls_that_start_the_script_are_left_out():
    ours = '  File "/ws/lib/0a/paceline/worker/script.py", line 7 in run'
    lines = ["Fatal Python error: Aborted", "Current thread 0x1:", '  File "train.py", line 1 in <module>', ours]
    assert crash_stack(lines).splitlines() == lines[:3]


def test_a_log_without_a_crash_has_none():
    assert crash_stack([]) is None
    assert crash_stack(["step 1", "Current thread 0x1 (most recent call first):", '  File "a.py", line 1 in f']) is None


def test_an_end_that_is_cut_short_is_told_as_far_as_it_goes():
    assert crash_stack(["Fatal Python error: Aborted"]) == "Fatal Python error: Aborted"
