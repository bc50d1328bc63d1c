"""What torch's flight recorder tells, as a board has it."""

from __future__ import annotations

import json

from paceline.remote.agent import recorded


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


def test_what_is_not_over_is_under_way():
    entries = [
        one(1),
        one(2, state="completed", retired=False),
        one(3, retired=False),
        one(4, "gloo:barrier", retired=False, input_sizes=[]),
    ]
    found = recorded.under_way(json.dumps({"entries": entries}).encode() + b'\n{"0": [0, 1, 2]}')
    assert found["last"] == {"0": 4}
    assert [(e["kind"], e["number"], e["shape"], e["bytes"], e["ranks"], e["began"]) for e in found["entries"]] == [
        ("all_reduce", 3, "[4, 3] float", 48, "0-2", 5.0),
        ("barrier", 4, "", 0, "0-2", 5.0),
    ]


def test_a_torch_without_a_recorder_says_nothing():
    assert recorded.under_way(b"") == {"entries": [], "last": {}}
