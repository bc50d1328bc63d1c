from __future__ import annotations

import pytest

from tests.helpers import run_python

# This code runs in a separate process, because it sets signal handlers.
SETUP = """
import os, signal, subprocess, time
from paceline.supervisor.supervision import Wake
wake = Wake()
def slept(seconds):
    start = time.monotonic(); wake.sleep(seconds); return time.monotonic() - start
"""


def answer(code: str) -> str:
    return run_python(SETUP + code).strip()


def test_supervisor_sleep_lasts_the_given_time():
    assert answer("print(0.1 <= slept(0.1) < 60, slept(-1) < 60)") == "True True"


def test_supervisor_sleep_ends_when_a_child_process_exits():
    code = "p = subprocess.Popen(['sleep', '0.1']); print(slept(120) < 60, p.wait(), wake.stopped_by)"
    assert answer(code) == "True 0 None"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_supervisor_sleep_ends_on_a_signal_and_remembers_it(name):
    code = f"os.kill(os.getpid(), signal.{name}); print(slept(120) < 60, wake.stopped_by == signal.{name}, slept(0.05) >= 0.05)"
    assert answer(code) == "True True True"


def test_supervisor_sleep_still_works_after_100000_signals():
    code = "for _ in range(100_000): os.kill(os.getpid(), signal.SIGCHLD)\nprint(slept(120) < 60, slept(0.05) >= 0.05)"
    assert answer(code) == "True True"


def test_started_worker_has_default_signal_handlers():
    code = "print(subprocess.run(['sh', '-c', 'kill -TERM $$; echo no']).returncode)"
    assert answer(code) == "-15"


def test_supervisor_sleep_ends_when_a_remote_node_sends_a_message():
    code = (
        "import threading, types\n"
        "elsewhere, here = types.SimpleNamespace(on_news=None), object()\n"
        "wake.heed(elsewhere); wake.heed(here)\n"
        "threading.Timer(0.1, elsewhere.on_news).start()\n"
        "print(slept(120) < 60, wake.stopped_by, slept(0.05) >= 0.05)"
    )
    assert answer(code) == "True None True"
