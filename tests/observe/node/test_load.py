"""The load of workers, measured on processes of these tests."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paceline.observe.node import load
from paceline.observe.node.load import WorkerLoads, below
from paceline.observe.node.nvml import Gpu
from paceline.system.step_clock import DATA, EVAL, StepClock
from tests.helpers import start_python, wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")

#: This worker holds memory and writes. It has forked a child that computes and shares this memory.
WORKS = """
import os, sys, time
held = b"x" * (64 << 20)
if os.fork() == 0:
    while True:
        sum(range(10000))
print("up", flush=True)
while True:
    time.sleep(1000)
"""


def test_load_of_a_worker_includes_children_and_counts_shared_memory_once(tmp_path):
    process = start_python(WORKS, start_new_session=True)
    try:
        assert process.stdout.readline() == "up\n"
        asked = {"folder": str(tmp_path), "ranks": {"0": process.pid, "1": 2**22 - 1}, "run_id": "r"}
        meter, found = WorkerLoads(), {}

        def computes():
            found.update(meter.look(asked, []))
            return found.get("0", {}).get("cpu_percent", 0) > 1

        wait_until(computes, "its child is seen to compute")
        assert found["0"]["processes"] == 2
        # Both processes have the 64 MiB in their address space, but shared memory must count only once.
        assert 0.06 < found["0"]["memory_gib"] < 0.115
        # Rank 1 has no living process, so it is not in the sample.
        assert "1" not in found
    finally:
        os.killpg(process.pid, 9)
        process.wait()
        process.stdout.close()


def test_load_sample_has_steps_per_second_and_percent_of_time_for_data_waiting_and_evaluation(tmp_path, monkeypatch):
    now = [50.0]
    monkeypatch.setattr(load.time, "monotonic", lambda: now[0])
    counted = StepClock(str(tmp_path / "steps_4"))
    asked = {"folder": str(tmp_path), "ranks": {"4": 0}, "run_id": "none"}
    meter = WorkerLoads()
    # In a container, the processes of a worker may be unknown. The counts of its steps are still reported.
    assert meter.look(asked, [])["4"] == {
        **{"steps": 0.0, "data_s": 0.0, "wait_s": 0.0},
        **{"eval_s": 0.0, "save_s": 0.0},
    }
    since = counted.begin(DATA)
    now[0] += 4
    counted.end(DATA, since)
    counted.waited(3.0)
    since = counted.begin(EVAL)
    now[0] += 2
    counted.end(EVAL, since)
    for _ in range(20):
        counted.step(meter)
    now[0] += 4
    found = meter.look(asked, [])["4"]
    assert (found["steps_s"], found["data_percent"], found["wait_percent"]) == (2.0, 40.0, 30.0)
    assert (found["eval_percent"], found["save_percent"]) == (20.0, 0.0)


def test_power_of_the_processors_comes_from_their_energy_counters(tmp_path, monkeypatch):
    now = [50.0]
    monkeypatch.setattr(load.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(load, "_RAPL", str(tmp_path))
    # The counter intel-rapl:0:0 is a part of intel-rapl:0 and must not be added.
    for microjoules in (0, 200_000_000):
        for name in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0"):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "energy_uj").write_text(f"{microjoules}\n")
        if not microjoules:
            meter = load.LoadMeter()
            meter.look()
            now[0] += 5
    assert meter.look()["cpu_watts"] == 80.0


def test_worker_process_of_a_rank_is_found_by_its_run_id_and_rank_variables(tmp_path):
    env = {**os.environ, "PACELINE_RUN_ID": "lab_1_f00d", "PACELINE_RANK": "5"}
    with subprocess.Popen(["sleep", "1000"], env=env) as process:
        meter = WorkerLoads()
        wait_until(
            lambda: meter.look({"folder": str(tmp_path), "ranks": {"5": 0}, "run_id": "lab_1_f00d"}, []).get("5"),
            "found",
        )
        found = meter.look({"folder": str(tmp_path), "ranks": {"5": 0}, "run_id": "lab_1_f00d"}, [])
        assert found["5"]["pid"] == process.pid
        assert process.pid in below([os.getpid()])[os.getpid()]
        process.kill()


def test_rank_is_assigned_the_gpus_that_its_processes_use(tmp_path):
    gib = 1 << 30
    with subprocess.Popen(["sleep", "1000"]) as process:
        gpus = [
            Gpu(0, 90.0, 5 * gib, 8 * gib, {1: 3 * gib}),
            Gpu(1, 70.0, 5 * gib, 8 * gib, {process.pid: 2 * gib, 1: gib}),
            Gpu(2, 10.0, 5 * gib, 8 * gib, {process.pid: gib}),
        ]
        asked = {"folder": str(tmp_path), "ranks": {"0": process.pid}, "run_id": "r"}
        found = WorkerLoads().look(asked, gpus)["0"]
        process.kill()
    assert (found["gpu_percent"], found["gpu_memory_gib"]) == (70.0, 3.0)
