"""A worker's variables with names of older services, and its translated arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import paceline

MAIN = Path(paceline.__file__).parent / "worker/__main__.py"
SHOW = "import json, os, sys\nprint(json.dumps([sys.argv[1:], dict(os.environ)]))\n"


def found(tmp_path: Path, *words: str, **variables: str) -> tuple[list[str], dict[str, str]]:
    (tmp_path / "attempts/1").mkdir(parents=True)
    (tmp_path / "train.py").write_text(SHOW)
    own = {"PACELINE_RUN_DIR": str(tmp_path), "PACELINE_ATTEMPT": "1", "PACELINE_RANK": "1", "PACELINE_WORLD_SIZE": "2"}
    own |= {"RANK": "1", "AZ_BATCH_MASTER_NODE": "10.0.0.1:1"}
    done = subprocess.run(
        [sys.executable, str(MAIN), *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(MAIN.parents[2]), **own, **variables},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout.splitlines()[-1]))


def test_variables_in_script_arguments_are_expanded_for_each_worker(tmp_path):
    words = (
        "--rank",
        "$RANK",
        "${RANK}x",
        "$AZUREML_DATAREFERENCE_train/a",
        "$NOT_THERE",
        "100$",
        "$AZ_BATCHAI_TASK_INDEX",
    )
    arguments, _ = found(tmp_path, "--", "train.py", *words, AZUREML_DATAREFERENCE_train="/data")
    assert arguments == ["--rank", "1", "1x", "/data/a", "$NOT_THERE", "100$", "1"]


def test_azureml_input_path_is_set_in_the_variable_named_like_the_input_unless_already_set(tmp_path):
    _, environment = found(
        tmp_path,
        *("--", "train.py"),
        AZUREML_DATASET_ENVIRONMENT_VARS="train:mount,HOME:download,gone:mount",
        PACELINE_INPUT_train="/data/train",
        PACELINE_INPUT_HOME="/data/home",
        HOME="/home/me",
    )
    assert (environment["train"], environment["HOME"]) == ("/data/train", "/home/me")
    assert "gone" not in environment


def test_shell_command_expands_its_own_variables_and_finds_the_python_of_the_job(tmp_path):
    own = Path(sys.executable).parent / "python"
    line = f"for RANK in a b; do echo $RANK; done; python train.py '$RANK'; test $(command -v python) = {own}"
    arguments, environment = found(tmp_path, "--kind", "program", "--", "bash", "-c", line)
    assert arguments == ["$RANK"]
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
