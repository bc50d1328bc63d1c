"""Stacks as faulthandler and py-spy write them."""

from __future__ import annotations

import faulthandler
import json
import threading

from paceline.observe.node import dumps

OLD = """Thread 0x00007f01 (most recent call first):
  File "/a/queue.py", line 171 in get
  File "/a/b c.py", line ??? in <module>

Current thread 0x00007f02 (most recent call first):
  File "/ws/train.py", line 3 in step
  File "/lib/paceline/worker/__main__.py", line 120 in <module>
"""
NEW = "Thread 0x00007f01 [loader] (most recent call first):\n  <no Python frame>\n" + OLD


def test_stack_dump_lists_the_main_thread_first():
    main, other = dumps.from_faulthandler(OLD)
    assert main["name"] == "main"
    assert main["current"]
    assert main["frames"][0] == {"file": "/ws/train.py", "line": 3, "function": "step"}
    assert [frame["line"] for frame in other["frames"]] == [171, 0]
    assert [thread["name"] for thread in dumps.from_faulthandler(NEW)] == ["main", "", "loader"]


def test_stack_dump_of_a_python_process_is_parsed(tmp_path):
    ready, done = threading.Event(), threading.Event()

    def waits():
        ready.set()
        done.wait()

    thread = threading.Thread(target=waits)
    thread.start()
    ready.wait()
    with open(tmp_path / "dump", "w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        found = dumps.from_faulthandler(file.read())
    done.set()
    thread.join()
    assert found[0]["frames"][0]["function"] == "test_stack_dump_of_a_python_process_is_parsed"
    assert any(frame["function"] == "waits" for thread in found[1:] for frame in thread["frames"])


def test_truncated_stack_dump_is_recognized():
    assert dumps.is_whole(OLD)
    assert not dumps.is_whole(OLD[:-2])
    assert not dumps.is_whole(OLD.partition("Current")[0])


def test_py_spy_dump_is_parsed():
    frames = [
        {"name": "recv", "filename": "libc.so", "line": 0},
        {"name": "step", "filename": "/ws/train.py", "line": 3},
    ]
    threads = [
        {"thread_name": "Thread-1", "os_thread_id": 8, "frames": []},
        {"thread_name": "MainThread", "os_thread_id": 7, "frames": frames, "owns_gil": True},
    ]
    main, other = dumps.from_py_spy(json.dumps(threads), 7)
    assert (main["name"], main["current"], main["frames"][1]["line"]) == ("main", True, 3)
    assert other["name"] == "Thread-1"


def one(number: int, kind: str = "gloo:all_reduce", **values):
    given = {
        "collective_seq_id": number,
        "p2p_seq_id": 0,
        "is_p2p": False,
        "process_group": ["0", "default_pg"],
        "profiling_name": kind,
    }
    shapes = {
        "input_sizes": [[4, 3]],
        "input_dtypes": ["Float"],
        "state": "scheduled",
        "retired": True,
        "time_created_ns": 5 * 10**9,
    }
    return {**given, **shapes, **values}


def test_unfinished_collectives_are_read_from_a_flight_recorder_dump():
    entries = [
        one(1),
        one(2, state="completed", retired=False),
        one(3, retired=False),
        one(4, "gloo:barrier", retired=False, input_sizes=[]),
    ]
    found = dumps.under_way(json.dumps({"entries": entries}).encode() + b'\n{"0": [0, 1, 2]}')
    assert found["last"] == {"0": 4}
    assert [(e["kind"], e["number"], e["shape"], e["bytes"], e["ranks"], e["began"]) for e in found["entries"]] == [
        ("all_reduce", 3, "[4, 3] float", 48, "0-2", 5.0),
        ("barrier", 4, "", 0, "0-2", 5.0),
    ]


def test_torch_without_a_flight_recorder_has_no_unfinished_collectives():
    assert dumps.under_way(b"") == {"entries": [], "last": {}}
