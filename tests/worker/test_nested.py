"""Ranks that a script starts itself, as their interpreters see them: the program is this one's, torch is a small fake."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

SHIM = Path(paceline.__file__).parent / "compat/shim/azureml_names"

#: This script prints to both streams, prints from native code, and ends without a newline.
LINES = """
import os, sys
print("a line", flush=True)
print("to standard error", file=sys.stderr, flush=True)
os.system("echo of a child")
print("no end", end="")
"""
PRINTED = "a line\nto standard error\nof a child\nno end"


def said(tmp_path: Path, code: str, **variables: str) -> dict[str, str]:
    """Run a Python process below a worker; the text of each log that has any."""
    logs = tmp_path / "ws/runs/digits_1_2/attempts/1"
    logs.mkdir(parents=True, exist_ok=True)
    with open(logs / "rank_0.log", "ab") as file:
        place = os.fstat(file.fileno())
        run = {
            "PACELINE_RUN_DIR": str(tmp_path / "ws/runs/digits_1_2"),
            "PACELINE_RUN_ID": "digits_1_2",
            "PACELINE_ATTEMPT": "1",
            "PACELINE_RANK": "0",
            "PACELINE_WORLD_SIZE": "1",
            "PACELINE_WORKER_OUTPUT": f"{place.st_dev}:{place.st_ino}",
            "PYTHONPATH": os.pathsep.join((str(SHIM.parents[3]), str(SHIM), str(tmp_path))),
        }
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **run, **variables}, stdout=file, stderr=file, check=True
        )
    texts = {path.stem: path.read_text() for path in sorted(logs.iterdir())}
    for path in logs.iterdir():
        path.unlink()
    return {name: text for name, text in texts.items() if text}


@pytest.mark.promise("ranks-script-starts-itself-recognised")
def test_rank_started_by_the_script_itself_has_its_own_log(tmp_path):
    torchrun = {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    assert said(tmp_path, LINES, RANK="1", **torchrun) == {"rank_1": PRINTED}
    # The output of rank 0 goes into the worker's own log, with the output of the launcher.
    assert said(tmp_path, LINES, RANK="0", **torchrun) == {"rank_0": PRINTED}


def test_two_launches_append_to_one_rank_log(tmp_path):
    code = f"import subprocess, sys\nfor _ in range(2): subprocess.run([sys.executable, '-c', {LINES!r}])"
    below = f"import os\nos.environ.update(RANK='2', WORLD_SIZE='3')\n{code}"
    assert said(tmp_path, below) == {"rank_2": PRINTED * 2}


@pytest.mark.promise("ranks-script-starts-itself-recognised")
def test_ranks_started_by_the_scripts_of_two_workers_have_separate_logs(tmp_path):
    torchrun = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    for worker, log in (("0", "rank_2"), ("1", "rank_3")):
        place = {"PACELINE_RANK": worker, "PACELINE_WORLD_SIZE": "2"}
        assert said(tmp_path, LINES, **torchrun, **place) == {log: PRINTED}


def test_output_of_a_process_without_a_rank_stays_in_the_log_of_its_worker(tmp_path):
    assert said(tmp_path, LINES) == {"rank_0": PRINTED}


def test_output_redirected_by_a_launcher_is_unchanged(tmp_path):
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "PACELINE_WORKER_OUTPUT": "1:1"}
    assert said(tmp_path, LINES, **torchrun) == {"rank_0": PRINTED}


@pytest.mark.promise("ranks-script-starts-itself-recognised")
def test_process_without_rank_variables_is_a_rank_after_joining_a_group(tmp_path):
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
    assert said(tmp_path, join.format(0, 1)) == {"rank_0": "before\nin\n"}
    assert said(tmp_path, join.format(1, 2)) == {"rank_0": "before\n", "rank_1": "in\n"}
    metrics = tmp_path / "ws/runs/digits_1_2/metrics"
    assert sorted(path.name for path in metrics.iterdir()) == ["rank_0.jsonl", "rank_1.jsonl"]


def test_sitecustomize_module_of_the_user_is_still_imported(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine')\n")
    found = said(tmp_path, "import sitecustomize; print(sitecustomize.__file__)")
    assert found == {"rank_0": f"mine\n{tmp_path}/sitecustomize.py\n"}


def test_output_of_a_python_program_is_unbuffered_without_the_variable_pythonunbuffered(tmp_path):
    code = "import faulthandler, os\nprint(faulthandler.is_enabled(), 'PYTHONUNBUFFERED' in os.environ)\nos._exit(0)"
    assert said(tmp_path, code) == {"rank_0": "True False\n"}


def test_script_that_imports_azureml_gets_the_id_of_its_run(tmp_path):
    code = "import os\nprint('AZUREML_RUN_ID' in os.environ)\nimport azureml\nprint(os.environ['AZUREML_RUN_ID'])"
    assert said(tmp_path, code) == {"rank_0": "False\ndigits_1_2\n"}
