"""`paceline prune --compute` on a real cluster leaves the Secrets that runs need, and no others."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paceline.runs import remote_status
from tests.kube.cluster import EDITOR, NARROW
from tests.kube.lab import COUNTS, TWO, KubeLab, wait_for_attempt, wait_for_end

pytest.importorskip("paceline.targets.kubernetes", reason="needs the compute target kubernetes")

pytestmark = [pytest.mark.kube, pytest.mark.timeout(900)]


def prune(lab: KubeLab, *words: str, code: int = 0) -> str:
    argv = [sys.executable, "-m", "paceline", "prune", "--compute", "k8s", *words]
    environment = {**os.environ, "PACELINE_WORKSPACE": str(lab.workspace_dir)}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout


def contents(lab: KubeLab) -> set[str]:
    """Return the names of the Secrets that runs share."""
    return set(lab.access.names("secrets", label="paceline/kind"))


def old_library(lab: KubeLab) -> str:
    """Store a Secret as an earlier version of the library leaves it. Return its name."""
    name = "paceline-library-0123456789abcdef-0"
    labels = {"app.kubernetes.io/managed-by": "paceline", "paceline/kind": "library"}
    lab.access.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name, "labels": labels}})
    return f"secret/{name}"


def test_prune_removes_secrets_that_no_run_needs(lab: KubeLab) -> None:
    run = lab.submit(COUNTS, arguments=["150"], **TWO)
    needed = contents(lab)
    old = old_library(lab)
    assert f"would remove {old}, which no run needs" in prune(lab, "--dry-run")
    assert contents(lab) == needed | {old}

    said = prune(lab, "--yes")

    assert said.count("removed secret/") == len({old} | (contents(lab) - needed))
    assert contents(lab) == needed
    wait_for_attempt(run, 1)
    assert wait_for_end(run) == "Completed"
    prune(lab, "--yes")
    assert contents(lab) == set()
    again = lab.submit("print('the library comes again')")
    assert wait_for_end(again) == "Completed"


def test_prune_ends_the_job_of_a_run_that_was_canceled_by_force(lab: KubeLab) -> None:
    run = lab.submit(COUNTS, arguments=["6000"], **TWO)
    wait_for_attempt(run, 1)
    remote_status.write_off(run.folder, by="test")
    name = remote_status.engine(run.folder)["job_id"]

    assert f"removed job/{name} of run {run.id}, which has ended" in prune(lab, "--yes")

    assert f"job.batch/{name}" not in lab.access.names("jobs")


def test_prune_names_the_missing_permission_if_the_user_has_only_the_smallest_kubernetes_role(lab: KubeLab) -> None:
    if lab.access.kubeconfig(NARROW) == lab.access.kubeconfig(EDITOR):
        pytest.skip("needs a user with the smallest Role")
    lab.add(NARROW)

    assert "may not list secrets" in prune(lab, "--yes", code=1)
