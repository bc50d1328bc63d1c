"""Samples of a worker's stacks: by py-spy's own text, and by signal of a process that answers as a worker does."""

from __future__ import annotations

import json
import os
import sys

import pytest

from paceline.observe.node import sampler
from paceline.observe.node.look import py_spy
from tests.helpers import start_python, wait_until

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")

#: A worker with a forked child, as with a DataLoader.
WORKER = """
import os, threading, time
from paceline.worker import watched
watched.begin()
def in_the_child():
    while True:
        time.sleep(0.001)
def computes():
    return sum(range(20000))
def main():
    print("up", flush=True)
    while True:
        computes()
if os.fork() == 0:
    in_the_child()
threading.Thread(target=time.sleep, args=(1000,), daemon=True, name="beside").start()
main()
"""


@pytest.fixture
def worker(tmp_path):
    environment = {"PACELINE_WATCH_DIR": str(tmp_path), "PACELINE_RANK": "2", "WORLD_SIZE": "1"}
    process = start_python(WORKER, environment=environment, start_new_session=True)
    assert process.stdout.readline() == "up\n"
    yield process
    os.killpg(process.pid, 9)
    process.wait()
    process.stdout.close()


def functions(found, where):
    """Function -> how often it was the innermost but one or the innermost, of stacks there."""
    counts = {}
    for place, numbers, count in found["stacks"]:
        if place.startswith(where):
            for number in set(numbers):
                name = found["frames"][number][0]
                counts[name] = counts.get(name, 0) + count
    return counts


def sampled(look, *enough):
    """Return a profile, once it has more than so many samples of each function. A busy machine may take fewer in the time."""
    looks = []

    def has_enough():
        looks.append(look())
        return "stacks" in looks[-1] and all(
            functions(looks[-1], where).get(name, 0) > count for where, name, count in enough
        )

    wait_until(has_enough, "enough samples", 30)
    return looks[-1]


@pytest.mark.promise("paceline-profile-samples-workers-while")
def test_profiler_without_py_spy_samples_main_threads_by_signal(worker, tmp_path, monkeypatch):
    monkeypatch.setattr(sampler, "py_spy", lambda: None)
    output = tmp_path / "told"
    asked = {"ranks": [2, 7], "seconds": 1.5, "rate": 100}

    def look():
        assert sampler.main([str(output), str(tmp_path), json.dumps(asked)]) == 0
        return json.loads(output.read_text())["ranks"]["2"]

    found = sampled(look, ("main", "main", 1), ("process ", "in_the_child", 1))
    told = json.loads(output.read_text())
    assert found["by"] == "signals"
    # The rate is limited, because each sample is a signal to the worker.
    assert 0 < found["rate"] <= 20
    assert told["ranks"]["7"] == {"silent": "no sample could be had of it"}
    assert "py-spy is not installed there, so the main threads alone were sampled" in told["notes"][0]
    # The samples leave no data in the worker's stack file.
    assert (tmp_path / "stacks_2").stat().st_size == 0


def test_profiler_falls_back_to_signals_if_py_spy_is_refused(worker, tmp_path, monkeypatch):
    refused = tmp_path / "refuses"
    refused.write_text("#!/bin/sh\necho 'Error: Operation not permitted (os error 1)' >&2\nexit 1\n")
    refused.chmod(0o755)
    monkeypatch.setattr(sampler, "py_spy", lambda: str(refused))
    notes: list[str] = []
    found = sampled(lambda: sampler.profile(str(tmp_path), [2], 1.0, 20.0, notes)["2"])
    assert found["by"] == "signals"
    assert notes[0].startswith("py-spy may not look into processes here")


def test_profiler_falls_back_to_signals_if_py_spy_returns_nothing(worker, tmp_path, monkeypatch):
    met_none = tmp_path / "met-none"
    met_none.write_text('#!/bin/sh\nwhile [ "$1" != --output ]; do shift; done\n: > "$2"\n')
    met_none.chmod(0o755)
    monkeypatch.setattr(sampler, "py_spy", lambda: str(met_none))
    notes: list[str] = []
    found = sampled(lambda: sampler.profile(str(tmp_path), [2], 1.0, 100.0, notes)["2"], ("main", "main", 1))
    assert found["by"] == "signals"
    assert notes == []


@pytest.mark.promise("paceline-profile-samples-workers-while")
def test_py_spy_samples_all_threads(worker, tmp_path):
    if py_spy() is None:
        pytest.skip("py-spy is not installed")
    notes: list[str] = []

    def look():
        found = sampler.profile(str(tmp_path), [2], 1.0, 50.0, notes)["2"]
        if found.get("by", "py-spy") != "py-spy":
            pytest.skip(f"py-spy may not look into processes here: {notes}")
        return found

    found = sampled(look, ("main", "computes", 5), ("process ", "in_the_child", 5))
    assert functions(found, "beside")
    assert not list(tmp_path.glob("profile_*"))


def test_py_spy_output_lines_are_parsed():
    # A command line in py-spy's output may contain newlines and semicolons.
    below = 'process 7:"python -c import os;\nx (1) 3\n";process 9:"python t.py";thread (9): MainThread'
    text = (
        f"{below};<module> (/w/t.py:12);Data.load (/w/d (1).py:4) 17\n"
        "thread (0x1F): pool-1;run (/w/t.py:3) 2\nthread (7);run (/w/t.py:3) 2\nnothing of it\n"
    )
    assert list(sampler.from_raw(text, 7)) == [
        ("process 9 main", [("<module>", "/w/t.py", 12), ("Data.load", "/w/d (1).py", 4)], 17),
        ("pool-1", [("run", "/w/t.py", 3)], 2),
        ("main", [("run", "/w/t.py", 3)], 2),
    ]
