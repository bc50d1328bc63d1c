"""The report of a fault is enough to examine it, and has nothing private of the user."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import pytest

import paceline
from paceline.job.environment import EnvironmentSpec
from paceline.reports.bug_report import bug_report, text
from paceline.runs import states
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from tests.helpers import make_job, make_run

SECRET = "hf_c0ffee"

TRACEBACK = f"""Traceback (most recent call last):
  File "/home/ann/{SECRET}/work/train.py", line 24, in main
    login(token="{SECRET}")
  File "/home/ann/env/lib/python3.11/site-packages/torch/nn/modules/module.py", line 7, in forward
    return login("{SECRET}")
  File "/home/ann/src/paceline/worker/script.py", line 3, in run
ValueError: {SECRET} is no token
"""


@pytest.fixture
def failed(tmp_path: Path) -> RunFolder:
    """A run that failed, with a secret in each place where a user may have put one."""
    job = make_job(
        node_count=2,
        process_count_per_node=2,
        distributed_backend="gloo",
        arguments=("--token", SECRET),
        environment_variables={"TOKEN": SECRET},
        environment=EnvironmentSpec(docker_image=f"registry/{SECRET}"),
    )
    failure = FailureReport(
        cause="exception",
        message=f"Rank 1 on node {SECRET} failed first: ValueError: {SECRET} is not a token",
        rank=1,
        node=SECRET,
        exception=f"ValueError: {SECRET} is not a token",
        traceback=TRACEBACK,
        last_lines=(SECRET,),
        victims=((0, SECRET),),
    )
    folder, fd = make_run(
        tmp_path / "runs",
        status=states.FAILED,
        job=job,
        failure=failure,
        target=SECRET,
        source_directory=f"/home/{SECRET}",
        submitted_by=SECRET,
        warnings=(SECRET,),
    )
    os.close(fd)
    folder.target.write_text(json.dumps({"kind": "slurm", "account": SECRET}))
    return folder


@pytest.mark.promise("bug-report-holds-argument-variable")
def test_bug_report_contains_no_user_data(failed: RunFolder) -> None:
    assert SECRET in (failed.path / "state.json").read_text()
    found = bug_report(failed)
    assert SECRET not in json.dumps(found) + text(found)
    assert "ann" not in json.dumps(found["run"])


@pytest.mark.promise("bug-report-holds-argument-variable")
def test_bug_report_names_the_paceline_function_that_failed(failed: RunFolder) -> None:
    run = bug_report(failed)["run"]
    assert run["frames"] == [
        "train.py:24 main",
        "torch/nn/modules/module.py:7 forward",
        "paceline/worker/script.py:3 run",
    ]
    assert {name: run[name] for name in ("target_kind", "workers", "backend", "cause", "rank", "exception")} == {
        "target_kind": "slurm",
        "workers": 4,
        "backend": "gloo",
        "cause": "exception",
        "rank": 1,
        "exception": "ValueError",
    }
    assert "train.py:24 main" in text(bug_report(failed))


def test_bug_report_has_failure_messages_on_request(failed: RunFolder) -> None:
    run = bug_report(failed, messages=True)["run"]
    assert run["exception"] == f"ValueError: {SECRET} is not a token"


def test_bug_report_without_a_run_has_the_python_and_paceline_versions() -> None:
    found = bug_report(None)
    assert "run" not in found
    assert found["versions"]["python"] == platform.python_version()
    assert found["versions"]["paceline"] == paceline.__version__
