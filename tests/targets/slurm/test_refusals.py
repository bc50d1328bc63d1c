"""Requests that no cluster takes, and what sbatch and salloc of each version have said of them."""

import shutil

import pytest

from paceline.errors import TargetError
from paceline.targets.slurm import SlurmTarget, examine
from paceline.targets.slurm.scheduler import Scheduler
from paceline.targets.slurm.settings import SlurmSettings
from paceline.targets.slurm.submission import try_out
from tests.helpers import make_job
from tests.targets.slurm.conftest import FakeSlurm
from tests.targets.slurm.recordings import VERSIONS, failure, recorded

REFUSED = {
    "partition": "Invalid partition name specified",
    "account": "Invalid account or account/partition combination specified",
    "qos": "Invalid qos specification",
    "constraint": "Invalid feature specification",
    "gres": r"Invalid generic resource \(gres\) specification",
    "reservation": "Requested reservation is invalid",
    "nodelist": "Invalid node name specified",
    "memory": "Requested node configuration is not available",
    "nodes": "Requested node configuration is not available",
    "bad time": "Invalid --time specification",
    "unknown option": "unrecognized option",
    "partition closed": "Required partition not available",
}


def look_at(slurm: FakeSlurm, version: str, request: str, *, lacks_nodes: bool = False) -> None:
    said = failure(version, f"sbatch --test-only: {request}")
    slurm.say("sbatch", err=said.stderr, code=said.returncode)
    made = SlurmSettings.of("c", {})
    try_out(Scheduler("c", made), "#!/bin/sh\n", lacks_nodes=lambda: lacks_nodes)


@pytest.mark.parametrize("version", VERSIONS)
def test_refusal_of_sbatch_is_reported_before_submission(slurm: FakeSlurm, version: str):
    for request, words in REFUSED.items():
        with pytest.raises(TargetError, match=f"^c: Slurm refuses the job: .*{words}"):
            look_at(slurm, version, request)


@pytest.mark.parametrize("version", VERSIONS)
def test_check_before_submission_accepts_a_job_that_the_slurm_queue_would_accept(slurm: FakeSlurm, version: str):
    look_at(slurm, version, "time")
    # If nodes are drained, or busy until an hour-long reservation begins, --test-only answers as if there were no such nodes.
    for request in ("drained", "busy", "partition down", "picky qos", "picky account"):
        assert (request, failure(version, f"sbatch: {request}").returncode) == (request, 0)
        look_at(slurm, version, request, lacks_nodes=True)


def test_check_before_submission_accepts_a_job_for_nodes_that_have_a_later_reservation(slurm: FakeSlurm):
    said = failure("22.05", "sbatch --test-only: busy")
    slurm.say("sbatch", err=said.stderr, code=said.returncode)
    slurm.say(
        "sinfo", sinfo := "".join(line for line in recorded("sinfo-22.05.txt").splitlines(True) if "n3" not in line)
    )
    assert sinfo.count("\n") == 2
    slurm.say("scontrol", "No reservations in the system\n")
    with pytest.raises(TargetError, match="node configuration is not available"):
        SlurmTarget("c").check(make_job())
    slurm.say("scontrol", "ReservationName=later StartTime=2026-11-21T18:20:56 Nodes=n1 State=INACTIVE\n")
    SlurmTarget("c").check(make_job())


@pytest.mark.parametrize("version", VERSIONS)
def test_doctor_parses_the_salloc_output_with_and_without_free_nodes(slurm: FakeSlurm, version: str):
    shutil.copy(slurm.folder / "bin" / "sbatch", slurm.folder / "bin" / "salloc")
    made = SlurmSettings.of("c", {})
    granted = failure(version, "salloc granted")
    slurm.say("salloc", err=granted.stderr, code=granted.returncode)
    number = "2" if version == "20.11" else "1"
    assert examine._allocate(Scheduler("c", made), 1) == number
    busy = failure(version, "salloc immediate")
    slurm.say("salloc", err=busy.stderr, code=busy.returncode)
    with pytest.raises(TargetError, match="c: Slurm has not given 2 nodes within"):
        examine._allocate(Scheduler("c", made), 2)
