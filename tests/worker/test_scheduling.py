"""Under which policy of the kernel's a worker computes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.worker import scheduling

MAIN = Path(paceline.__file__).parent / "worker/__main__.py"
#: This script prints the scheduling policy of the script's thread, of a new thread, and of a child process.
SHOW = """
import os, subprocess, sys, threading
print(os.sched_getscheduler(0))
threading.Thread(target=lambda: print(os.sched_getscheduler(0))).start()
subprocess.run([sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"])
"""

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the kernel is not Linux")


@pytest.fixture
def asked(monkeypatch):
    """The policies that this process asks for, from now on; there is no GPU, and the policy is the usual one."""
    policies: list[int] = []
    monkeypatch.setattr(scheduling, "_GPU_DEVICES", ())
    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: os.SCHED_OTHER)
    monkeypatch.setattr(os, "sched_setscheduler", lambda pid, policy, param: policies.append(policy))
    return policies


def policies(folder: Path, start=None, **variables: str) -> list[str]:
    (folder / "train.py").write_text(SHOW)
    (folder / "attempts/1").mkdir(parents=True, exist_ok=True)
    environment = {name: text for name, text in os.environ.items() if name != scheduling.VARIABLE}
    environment |= {
        "PYTHONPATH": str(MAIN.parents[2]),
        "PYTHONUNBUFFERED": "1",
        "PACELINE_RANK": "0",
        "PACELINE_WORLD_SIZE": "1",
    }
    environment |= {"PACELINE_RUN_DIR": str(folder), "PACELINE_ATTEMPT": "1", **variables}
    command = [sys.executable, str(MAIN), "--", "train.py"]
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=start
    )
    return done.stdout.split()


@pytest.mark.promise("linux-worker-without-gpu-batch")
def test_cpu_worker_threads_and_children_use_sched_batch(tmp_path):
    assert policies(tmp_path, CUDA_VISIBLE_DEVICES="") == [str(os.SCHED_BATCH)] * 3


@pytest.mark.promise("linux-worker-without-gpu-batch")
def test_scheduling_policy_set_by_the_user_is_kept(tmp_path):
    assert policies(tmp_path, CUDA_VISIBLE_DEVICES="", PACELINE_SCHEDULING="normal") == [str(os.SCHED_OTHER)] * 3
    idle = lambda: os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # noqa: E731
    assert policies(tmp_path, idle, CUDA_VISIBLE_DEVICES="") == [str(os.SCHED_IDLE)] * 3


@pytest.mark.promise("linux-worker-without-gpu-batch")
def test_gpu_worker_keeps_the_default_scheduling_policy(tmp_path):
    assert policies(tmp_path, CUDA_VISIBLE_DEVICES="0") == [str(os.SCHED_OTHER)] * 3


@pytest.mark.parametrize("shown", [None, "", "-1", "0,1"])
@pytest.mark.parametrize("has_driver", [True, False])
def test_workers_that_may_use_a_gpu_are_detected(tmp_path, monkeypatch, asked, shown, has_driver):
    device = tmp_path / "nvidiactl"
    if has_driver:
        device.touch()
    monkeypatch.setattr(scheduling, "_GPU_DEVICES", (str(device),))
    scheduling.begin({} if shown is None else {"CUDA_VISIBLE_DEVICES": shown})
    assert asked == ([] if shown == "0,1" or (shown is None and has_driver) else [os.SCHED_BATCH])


def test_invalid_scheduling_value_warns_and_uses_the_default(asked, capsys):
    scheduling.begin({scheduling.VARIABLE: "norml"})
    assert asked == [os.SCHED_BATCH]
    assert capsys.readouterr().err == "paceline: PACELINE_SCHEDULING is 'norml'; there are batch and normal\n"


def test_worker_starts_if_the_kernel_forbids_the_scheduling_policy(asked, monkeypatch):
    def refuse(*given):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    scheduling.begin({})
