"""HOROVOD_TIMELINE names the trace of a whole job, whose script need not call shutdown."""

from __future__ import annotations

import json
from pathlib import Path

from tests.compat.horovod.conftest import run_on_ranks

ROOT = Path(__file__).parents[3]
SCRIPT = """
import torch

import paceline.compat

paceline.compat.install("horovod")
import horovod.torch as hvd

hvd.init()
hvd.allreduce(torch.ones(2), name="a")
hvd.allreduce(torch.ones(2), name="b")
"""


def test_timeline_is_valid_json_without_a_call_of_shutdown(tmp_path):
    script, trace = tmp_path / "train.py", tmp_path / "new folder" / "trace.json"
    script.write_text(SCRIPT)
    done = run_on_ranks(1, script, PYTHONPATH=str(ROOT / "src"), HOROVOD_TIMELINE=str(trace))
    assert done.returncode == 0, done.stderr
    events = json.loads(trace.read_text())
    start, *named = [event["args"] for event in events if event.get("name") == "process_name"]
    assert abs(start["start_time_since_epoch_in_micros"] / 1e6 - trace.stat().st_mtime) < 60
    assert [args["name"] for args in named] == ["allreduce.a", "allreduce.b"]
