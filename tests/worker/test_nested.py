"""Ranks that a script starts by itself, as their interpreters see them: the program is this one's, torch is a small fake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import paceline

SHIM = Path(paceline.__file__).parent / "compat/shim/azureml_names"

#: Prints lines as scripts do: in pieces, to both streams, as a bar of progress, without an end.
LINES = """
import sys
print("a", end=" "); print("line")
print("to standard error", file=sys.stderr)
sys.stderr.write("\\r 10%"); sys.stderr.flush()
sys.stderr.write("\\r 20%\\n")
print("no end", end="")
"""


def said(tmp_path: Path, code: str, **variables: str) -> str:
    """What a Python process below a worker writes into the worker's log."""
    log = tmp_path / "rank_0.log"
    with open(log, "ab") as file:
        place = os.fstat(file.fileno())
        run = {
            "PACELINE_RUN_DIR": str(tmp_path / "ws/runs/digits_1_2"),
            "PACELINE_RUN_ID": "digits_1_2",
            "PACELINE_ATTEMPT": "1",
            "PACELINE_RANK": "0",
            "PYTHONUNBUFFERED": "1",
            "PACELINE_WORLD_SIZE": "1",
            "PACELINE_WORKER_OUTPUT": f"{place.st_dev}:{place.st_ino}",
            "PYTHONPATH": os.pathsep.join((str(SHIM.parents[3]), str(SHIM), str(tmp_path))),
        }
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **run, **variables}, stdout=file, stderr=file, check=True
        )
    return log.read_bytes().decode()


def test_lines_of_a_nested_rank_have_its_number(tmp_path):
    text = said(tmp_path, LINES, RANK="1", WORLD_SIZE="2", TORCHELASTIC_RUN_ID="none")
    assert text == (
        "[rank 1] a line\n[rank 1] to standard error\n[rank 1] \r[rank 1]  10%\r[rank 1]  20%\n[rank 1] no end"
    )


def test_lines_of_a_process_that_is_no_rank_stay_as_they_are(tmp_path):
    assert said(tmp_path, LINES) == "a line\nto standard error\n\r 10%\r 20%\nno end"


def test_output_that_a_launcher_has_redirected_stays_as_it_is(tmp_path):
    text = said(tmp_path, LINES, RANK="1", WORLD_SIZE="2", PACELINE_WORKER_OUTPUT="1:1")
    assert "[rank" not in text


def test_a_process_without_variables_is_a_rank_once_it_has_joined_a_group(tmp_path):
    package = tmp_path / "torch/distributed"
    package.mkdir(parents=True)
    (tmp_path / "torch/__init__.py").touch()
    (package / "__init__.py").write_text("from torch.distributed.distributed_c10d import *\n")
    (package / "distributed_c10d.py").write_text(
        "place = (0, 1)\n"
        "def init_process_group(backend, rank, world_size):\n    global place\n    place = rank, world_size\n"
        "def get_rank(): return place[0]\n"
        "def get_world_size(): return place[1]\n"
    )
    join = (
        "import torch.distributed as dist\nfrom paceline.trackers.sink import sink\nprint('before')\n"
        "dist.init_process_group('gloo', {}, {})\nprint('in')\n"
        "sink().log('tensorboard', 'loss', 1.0)\n"
    )
    assert said(tmp_path, join.format(0, 1)) == "before\nin\n"
    assert said(tmp_path, join.format(1, 2)).endswith("before\n[rank 1] in\n")
    metrics = tmp_path / "ws/runs/digits_1_2/metrics"
    assert sorted(path.name for path in metrics.iterdir()) == ["rank_0.jsonl", "rank_1.jsonl"]


def test_a_sitecustomize_of_the_user_s_is_still_run(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    assert (
        said(tmp_path, "import sitecustomize; print(sitecustomize.__file__)") == f"mine\n{tmp_path}/sitecustomize.py\n"
    )
