"""The second job of an elastic run, against a Slurm that says what the test wants."""

from __future__ import annotations

import pytest

from paceline.errors import EngineError
from paceline.targets.slurm import extension
from paceline.targets.slurm.extension import Extension
from paceline.targets.slurm.scheduler import Scheduler
from paceline.targets.slurm.settings import SlurmSettings
from tests.helpers import make_job
from tests.targets.slurm.conftest import FakeSlurm

JOB = make_job(node_count=(1, 4), distributed_backend="gloo")


@pytest.fixture
def more(slurm: FakeSlurm) -> Extension:
    settings = SlurmSettings.of("cluster", {})
    slurm.say("sbatch", "8\n")
    return Extension(Scheduler("compute target 'cluster'", settings), "lab_1_2", "7")


def test_it_is_asked_for_once_and_its_nodes_count_once_it_has_begun(slurm: FakeSlurm, more: Extension) -> None:
    slurm.say("squeue", "7|RUNNING|n[1-2]\n")
    assert more.look(JOB, ["n1", "n2"]) == 0
    assert "#SBATCH --nodes=1-2\n" in slurm.script
    slurm.say("squeue", "7|RUNNING|n[1-2]\n8|PENDING|\n")
    assert (more.look(JOB, ["n1", "n2"]), more.current()) == (0, ())
    slurm.say("squeue", "7|RUNNING|n[1-2]\n8|RUNNING|n3\n")
    assert (more.look(JOB, ["n1", "n2"]), more.current()) == (1, ("n3",))
    assert slurm.count("sbatch") == 1
    more.cancel()
    assert slurm.calls[-1] == "scancel 8"


def test_a_node_of_the_run_s_own_job_that_lives_is_one_more(slurm: FakeSlurm, more: Extension) -> None:
    """Its agent was killed, or it was cut off for less long than Slurm takes to notice."""
    slurm.say("squeue", "7|RUNNING|n[1-3]\n")
    slurm.say("sinfo", "n2|mixed\nn3|down*\n")
    assert more.look(JOB, ["n1"]) == 1
    assert "#SBATCH --nodes=1-2\n" in slurm.script


def test_nodes_that_no_checkpoint_takes_over_go_back(
    slurm: FakeSlurm, more: Extension, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.say("squeue", "7|RUNNING|n1\n")
    more.look(JOB, ["n1"])
    slurm.say("squeue", "7|RUNNING|n1\n8|RUNNING|n2\n")
    assert more.look(JOB, ["n1"]) == 1
    monkeypatch.setattr(extension, "_UNUSED_S", -1.0)
    assert more.look(JOB, ["n1"]) == 0
    assert "scancel 8" in slurm.calls
    slurm.say("squeue", "7|RUNNING|n1\n")
    more.look(JOB, ["n1"])
    assert slurm.count("sbatch") == 1, "not again in this attempt"
    more.begin()
    more.look(JOB, ["n1"])
    assert slurm.count("sbatch") == 2


def test_one_that_has_ended_is_asked_for_anew_and_silence_says_nothing(slurm: FakeSlurm, more: Extension) -> None:
    slurm.say("squeue", "7|RUNNING|n1\n")
    more.look(JOB, ["n1"])
    slurm.say("squeue", err="slurm_load_jobs error: something else", code=1)
    with pytest.raises(EngineError, match="squeue can't tell"):
        more.look(JOB, ["n1"])
    slurm.say("squeue", "7|RUNNING|n1\n")  # its time was up
    more.look(JOB, ["n1"])
    assert slurm.count("sbatch") == 2
