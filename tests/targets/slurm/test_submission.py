from __future__ import annotations

import pytest

from paceline.errors import EngineError, TargetError
from paceline.targets.slurm import scheduler as scheduler_module
from paceline.targets.slurm import submission
from paceline.targets.slurm.scheduler import Scheduler
from paceline.targets.slurm.settings import SlurmSettings
from paceline.targets.slurm.submission import Extension, environment, submit, try_out
from tests.helpers import make_job, write_program
from tests.targets.slurm.conftest import FakeSlurm

SCRIPT = (
    "#!/bin/bash\n#SBATCH --job-name=paceline-r\n#SBATCH --nodes=2\n#SBATCH --partition=nope\n"
    '#SBATCH "--gres=gpu:a b"\nexec x\n'
)
TITLE = "compute target 'c'"

JOB = make_job(node_count=(1, 4), distributed_backend="gloo")


def submit_it(**settings: object) -> str:
    made = SlurmSettings.of("c", settings)
    return submit(Scheduler(TITLE, made), SCRIPT, name="paceline-r", user="1000")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "_PAUSES_S", (0.001,))


@pytest.mark.parametrize("out", ["4211\n", "4211;lab\n", "a banner of the site\n4211\n"])
def test_job_id_is_parsed_from_sbatch_output(slurm: FakeSlurm, out: str):
    slurm.say("sbatch", out)
    assert submit_it() == "4211"
    assert slurm.script == SCRIPT


def test_refusal_by_slurm_is_one_error_with_the_requested_options(slurm: FakeSlurm):
    slurm.say(
        "sbatch",
        err="sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition name specified\n",
        code=1,
    )
    made = SlurmSettings.of("c", {})
    expected = (
        "compute target 'c': Slurm refuses the job: invalid partition specified: nope; Invalid partition name specified. "
        "Asked for: --nodes=2, --partition=nope, --gres=gpu:a b. See the settings of the target: `paceline compute show`."
    )
    with pytest.raises(TargetError) as caught:
        try_out(Scheduler(TITLE, made), SCRIPT)
    assert str(caught.value) == expected
    assert slurm.calls == ["sbatch --test-only"]
    with pytest.raises(TargetError) as caught:
        submit_it()
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    "words",
    [
        "allocation failure: Required node not available (down, drained or reserved)",
        "allocation failure: Unable to contact slurm controller (connect failure)",
    ],
)
def test_temporary_slurm_condition_does_not_refuse_a_job(slurm: FakeSlurm, words: str):
    slurm.say("sbatch", err=words, code=1)
    made = SlurmSettings.of("c", {})
    try_out(Scheduler(TITLE, made), SCRIPT)


def test_job_whose_nodes_are_down_is_accepted_and_waits(slurm: FakeSlurm):
    slurm.say("sbatch", err="allocation failure: Requested node configuration is not available", code=1)
    made = SlurmSettings.of("c", {})
    try_out(Scheduler(TITLE, made), SCRIPT, lacks_nodes=lambda: True)
    with pytest.raises(TargetError, match="node configuration is not available"):
        try_out(Scheduler(TITLE, made), SCRIPT, lacks_nodes=lambda: False)


def test_submission_accepted_without_a_reply_is_not_repeated(slurm: FakeSlurm):
    slurm.say(
        "sbatch", err="sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", code=1
    )
    slurm.say("squeue", "4211|PENDING|None||paceline-r\n")
    assert submit_it() == "4211"
    assert slurm.count("sbatch") == 1


def test_submission_is_retried_while_the_slurm_controller_is_unreachable(slurm: FakeSlurm):
    write_program(
        slurm.folder / "bin" / "sbatch",
        f"#!/bin/sh\ncd '{slurm.folder}'\necho sbatch >> calls\n"
        "[ $(grep -c sbatch calls) -gt 2 ] && echo 12 && exit 0\n"
        "echo 'Batch job submission failed: Unable to contact slurm controller (connect failure)' >&2; exit 1\n",
    )
    assert submit_it() == "12"
    assert slurm.count("sbatch") == 3


def test_job_inherits_the_shell_environment_without_variables_of_another_job(slurm: FakeSlurm):
    shell = {
        "HOME": "/home/me",
        "SLURM_CONF": "/etc/x",
        "SLURM_JOB_ID": "1",
        "SLURM_CPU_BIND": "quiet",
        "PMIX_RANK": "0",
        "SBATCH_OUTPUT": "mine.log",
        "SBATCH_ACCOUNT": "physics",
        "SBATCH_PARTITION": "other",
        "SBATCH_WAIT": "1",
    }
    kept = {"HOME": "/home/me", "SLURM_CONF": "/etc/x", "SBATCH_ACCOUNT": "physics"}
    assert environment(shell, SlurmSettings.of("c", {"partition": "gpu"})) == kept
    assert environment(shell, SlurmSettings.of("c", {})) == kept | {"SBATCH_PARTITION": "other"}


@pytest.fixture
def more(slurm: FakeSlurm) -> Extension:
    settings = SlurmSettings.of("cluster", {})
    slurm.say("sbatch", "8\n")
    return Extension(Scheduler("compute target 'cluster'", settings), "lab_1_2", "7")


def test_additional_slurm_job_is_submitted_once_and_provides_nodes_when_running(
    slurm: FakeSlurm, more: Extension
) -> None:
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


def test_recovered_node_of_the_current_slurm_allocation_is_reported_as_available(
    slurm: FakeSlurm, more: Extension
) -> None:
    """Its agent was killed, or it was cut off for less long than Slurm takes to notice."""
    slurm.say("squeue", "7|RUNNING|n[1-3]\n")
    slurm.say("sinfo", "n2|mixed\nn3|down*\n")
    assert more.look(JOB, ["n1"]) == 1
    assert "#SBATCH --nodes=1-2\n" in slurm.script


def test_additional_slurm_job_is_canceled_if_the_run_leaves_its_nodes_unused(
    slurm: FakeSlurm, more: Extension, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.say("squeue", "7|RUNNING|n1\n")
    more.look(JOB, ["n1"])
    slurm.say("squeue", "7|RUNNING|n1\n8|RUNNING|n2\n")
    assert more.look(JOB, ["n1"]) == 1
    monkeypatch.setattr(submission, "_UNUSED_S", -1.0)
    assert more.look(JOB, ["n1"]) == 0
    assert "scancel 8" in slurm.calls
    slurm.say("squeue", "7|RUNNING|n1\n")
    more.look(JOB, ["n1"])
    assert slurm.count("sbatch") == 1, "not again in this attempt"
    more.begin()
    more.look(JOB, ["n1"])
    assert slurm.count("sbatch") == 2


def test_ended_additional_slurm_job_is_submitted_again_and_a_squeue_error_raises_engine_error(
    slurm: FakeSlurm, more: Extension
) -> None:
    slurm.say("squeue", "7|RUNNING|n1\n")
    more.look(JOB, ["n1"])
    slurm.say("squeue", err="slurm_load_jobs error: something else", code=1)
    with pytest.raises(EngineError, match="squeue can't tell"):
        more.look(JOB, ["n1"])
    slurm.say("squeue", "7|RUNNING|n1\n")  # only job 7 is left, because the additional job has reached its time limit
    more.look(JOB, ["n1"])
    assert slurm.count("sbatch") == 2
