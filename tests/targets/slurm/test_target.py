import os
import time
from pathlib import Path

import pytest

from paceline.errors import EngineError, TargetError
from paceline.runs import store
from paceline.runs.folder import RunFolder
from paceline.runs.remote_status import GONE, QUEUED, RUNNING, engine
from paceline.system.detached_process import library_dir
from paceline.system.files import write_json
from paceline.targets.configured import kind_class, make_target
from paceline.targets.slurm import SlurmTarget, allocation
from paceline.targets.slurm.allocation import LinkError
from paceline.targets.slurm.login import There
from paceline.targets.slurm.states import JobState
from paceline.targets.status import SettingError
from tests.helpers import make_job, make_run, write_program
from tests.targets.slurm.conftest import FakeSlurm

NO_ACCOUNTING = "Slurm accounting storage is disabled\n"


def submitted(tmp_path: Path, slurm: FakeSlurm, **settings: object) -> tuple[SlurmTarget, RunFolder]:
    """A run that was given to Slurm as job 7."""
    folder, fd = make_run(tmp_path / "ws" / "runs")
    slurm.say("sbatch", "7\n")
    target = SlurmTarget("cluster", settings)
    target.enqueue(make_job(), folder.path)
    assert target.start_supervisor(folder.path, fd, library_dir(tmp_path / "ws"), "/env/python") == 0
    os.close(fd)
    return SlurmTarget("cluster", settings), folder


def test_slurm_target_class_is_found_by_its_kind_name():
    assert kind_class("slurm") is SlurmTarget
    assert make_target("slurm", "cluster", {"partition": "gpu"}).settings.partition == "gpu"


def test_submission_records_the_job_id_and_the_script_starts_the_supervisor_of_the_run(
    tmp_path: Path, slurm: FakeSlurm
):
    _, folder = submitted(tmp_path, slurm, partition="gpu")
    noted = engine(folder)
    assert (noted["engine"], noted["job_id"], noted["user"]) == ("slurm", "7", str(os.geteuid()))
    assert "#SBATCH --partition=gpu\n" in slurm.script
    assert slurm.script.endswith(f"exec /env/python -m paceline.supervisor {folder.path}\n")


def test_dry_run_script_differs_only_in_paths_and_id(tmp_path: Path, slurm: FakeSlurm):
    target, folder = submitted(tmp_path, slurm)
    library = library_dir(tmp_path / "ws")
    dry = target.script(make_job(), python="/env/python")
    real = slurm.script.replace(str(folder.path), "/RUN_FOLDER").replace(str(library), "/LIBRARY")
    assert real.replace(folder.run_id, "RUN_ID") == dry


def test_slurm_refusal_is_raised_before_a_run_exists(slurm: FakeSlurm):
    slurm.say("sbatch", err="sbatch: error: invalid partition specified: nope", code=1)
    with pytest.raises(
        TargetError, match=r"compute target 'cluster': Slurm refuses the job: invalid partition.*--partition=nope"
    ):
        SlurmTarget("cluster", {"partition": "nope"}).check(make_job())


def test_queued_run_reports_its_waiting_reason(tmp_path: Path, slurm: FakeSlurm):
    target, folder = submitted(tmp_path, slurm)
    slurm.say("squeue", f"7|PENDING|Priority||paceline-{folder.run_id}\n")
    look = target.look(folder, store.stored(folder))
    assert (look.state, look.message) == (QUEUED, "Slurm job 7: jobs with a higher priority are ahead (Priority)")


def test_run_state_file_newer_than_the_cached_squeue_answer_takes_precedence(tmp_path: Path, slurm: FakeSlurm):
    target, folder = submitted(tmp_path, slurm)
    slurm.say("squeue", f"7|PENDING|Priority||paceline-{folder.run_id}\n")
    assert target.look(folder, store.stored(folder)).state == QUEUED
    os.utime(folder.state, (time.time() + 1, time.time() + 1))
    assert target.look(folder, store.stored(folder)).state == RUNNING
    assert slurm.count("squeue") == 1


def test_canceled_slurm_job_is_reported_as_gone_with_the_canceling_user(tmp_path: Path, slurm: FakeSlurm):
    target, folder = submitted(tmp_path, slurm)
    slurm.say("squeue", f"7|CANCELLED|None|n1|paceline-{folder.run_id}\n")
    slurm.say("sacct", "7|CANCELLED by 0|0:15|None|n1|x\n")
    look = target.look(folder, store.stored(folder))
    assert (look.state, look.cause, look.by) == (GONE, "cancel", "root")


def test_run_whose_job_slurm_does_not_know_is_reported_as_gone(tmp_path: Path, slurm: FakeSlurm):
    target, folder = submitted(tmp_path, slurm)
    slurm.say("sacct", err=NO_ACCOUNTING, code=1)
    look = target.look(folder, store.stored(folder))
    assert (look.state, look.cause) == (GONE, "engine")
    assert "knows nothing of job 7 any more" in look.message


def test_job_with_an_unrecorded_id_is_found_by_name(tmp_path: Path, slurm: FakeSlurm):
    folder, fd = make_run(tmp_path / "ws" / "runs")
    target = SlurmTarget("cluster")
    target.enqueue(make_job(), folder.path)
    slurm.say("squeue", f"9|RUNNING|None|n1|paceline-{folder.run_id}\n")
    # The submitting process still holds the lock, so it will record the job id.
    assert target.look(folder, store.stored(folder)).state == QUEUED
    assert slurm.calls == []
    os.close(fd)
    assert target.look(folder, store.stored(folder)).state == RUNNING
    assert engine(folder)["job_id"] == "9"


def test_submitter_killed_before_sbatch_leaves_a_run_not_started(tmp_path: Path, slurm: FakeSlurm):
    folder, fd = make_run(tmp_path / "ws" / "runs")
    os.close(fd)
    write_json(folder.engine, {"engine": "slurm", "user": "0", "submitting": time.time() - 1000})
    look = SlurmTarget("cluster").look(folder, store.stored(folder))
    assert (look.state, look.cause) == (GONE, "not_started")


def test_cancel_ends_only_pending_jobs(tmp_path: Path, slurm: FakeSlurm):
    target, folder = submitted(tmp_path, slurm)
    target.cancel(folder, store.stored(folder))
    assert slurm.calls[-1] == "scancel --state=PENDING 7"


class FarLogin:
    """A login host to which runs are sent. During the transfer, a user cancels the run."""

    def __init__(self) -> None:
        self.put_files: dict[str, object] = {}
        self.removed: list[str] = []

    def push(self, folder: RunFolder, library_dir: Path) -> There:
        write_json(folder.cancel_request, {"by": "me"})
        return There(folder="/far", user="77", run_dir=f"/far/runs/{folder.run_id}", library_dir="/far/lib/1")

    def put(self, path: str, value: object) -> None:
        self.put_files[path] = value

    def remove(self, path: str) -> None:
        self.removed.append(path)


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FarLogin:
    login = FarLogin()
    write_program(
        tmp_path / "far" / "ssh", '#!/bin/sh\n[ "$1" = -G ] && exit 0\nfor last; do :; done\nexec sh -c "$last"\n'
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'far'}:{os.environ['PATH']}")
    monkeypatch.setattr(SlurmTarget, "_login", lambda self: login)
    return login


@pytest.mark.parametrize("count", [1, 2])
def test_runs_canceled_during_their_transfer_are_canceled_after_the_submission(
    tmp_path: Path, slurm: FakeSlurm, far: FarLogin, count: int
):
    if count == 1:
        folders = [submitted(tmp_path, slurm, login="head")[1]]
    else:
        made = [make_run(tmp_path / "ws" / "runs", f"lab_1800000000_00000002_{number}") for number in range(count)]
        folders = [folder for folder, _ in made]
        slurm.say("sbatch", "7\n")
        target = SlurmTarget("cluster", {"login": "head"})
        target.start_supervisors(make_job(), [folder.path for folder in folders], tmp_path, "/env/python", 2)
        for _, fd in made:
            os.close(fd)
    assert far.put_files == {f"/far/runs/{folder.run_id}/cancel.json": {"by": "me"} for folder in folders}
    canceled = [call for call in slurm.calls if call.startswith("scancel")]
    assert canceled == [f"scancel --state=PENDING {engine(folder)['job_id']}" for folder in folders]


@pytest.mark.parametrize("noticed_by", ["release", "look"])
def test_secrets_of_a_run_that_slurm_does_not_have_are_removed_from_the_cluster(
    tmp_path: Path, slurm: FakeSlurm, far: FarLogin, noticed_by: str
):
    folder, fd = make_run(tmp_path / "ws" / "runs")
    slurm.say("sbatch", err="sbatch: error: Invalid qos specification", code=1)
    target = SlurmTarget("cluster", {"login": "head"})
    target.enqueue(make_job(), folder.path)
    write_json(folder.secrets, {"TOKEN": "x"})
    with pytest.raises(TargetError, match="Invalid qos"):
        target.start_supervisor(folder.path, fd, tmp_path, "/env/python")
    os.close(fd)
    if noticed_by == "release":
        target.release(folder.path)
    else:
        write_json(folder.engine, {**engine(folder), "submitting": 1.0})
        assert target.look(folder, store.stored(folder)).cause == "not_started"
    assert far.removed == [f"/far/runs/{folder.run_id}/secrets.json"]
    assert not engine(folder)["has_secrets"]


def test_releasing_the_nodes_of_a_run_cancels_its_slurm_job_except_from_inside_that_job(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
):
    target, folder = submitted(tmp_path, slurm)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    target.release(folder.path)
    assert slurm.count("scancel") == 0
    monkeypatch.delenv("SLURM_JOB_ID")
    target.release(folder.path)
    assert slurm.calls[-1] == "scancel 7"
    # The error of scancel must not hide the error that made the submission fail.
    slurm.say("scancel", err="scancel: error: Unable to contact slurm controller (connect failure)", code=1)
    target.release(folder.path)


def test_status_needs_one_sinfo_and_one_squeue_call(slurm: FakeSlurm):
    recorded = Path(__file__).parent / "recorded" / "sinfo-20.11.txt"
    slurm.say("sinfo", recorded.read_text())
    jobs = (
        "7|RUNNING|ann|16|gres/gpu:2|2|n[1-2]|None|paceline-digits_1700000000_00000001",
        "8|PENDING|bob|4|N/A|1||Priority|a|b",
        "9|PENDING|bob|?||x||(BadConstraints)|c",
        "a line of another kind",
    )
    slurm.say("squeue", "\n".join(jobs))
    status = SlurmTarget("cluster", {"partition": "gpu"}).status()
    assert (status.state, status.cores, status.used_cores, status.gpus, status.used_gpus) == ("degraded", 16, 10, 4, 2)
    assert (status.queued, status.running) == (2, 1)
    assert status.nodes[2].message == "bad fan"
    held, waits, never = status.jobs
    assert (held.run_id, held.user, held.node, held.cores, held.gpus) == (
        "digits_1700000000_00000001",
        "ann",
        "n[1-2]",
        16,
        "4",
    )
    assert (waits.run_id, waits.is_waiting, waits.gpus) == ("a|b", True, "")
    assert "jobs with a higher priority are ahead" in waits.reason
    assert "no node has what it asks for" in never.reason
    assert [call.split()[:3] for call in slurm.calls] == [["sinfo", "-p", "gpu"], ["squeue", "-h", "-p"]]


def test_unknown_partition_is_reported_with_the_existing_ones(slurm: FakeSlurm):
    write_program(slurm.folder / "bin" / "sinfo", "#!/bin/sh\n[ \"$1\" = -p ] || printf 'main\\nshort\\nmain\\n'\n")
    with pytest.raises(
        SettingError, match=r"'cluster': Slurm has no partition 'gpuu', 'x'; it has main, short\. Change"
    ):
        SlurmTarget("cluster", {"partition": "gpuu,main,x"}).status()
    assert SlurmTarget("cluster", {"partition": "main"}).status().nodes == ()  # a partition may have no nodes


def test_waiting_for_nodes_outside_a_job_raises_target_error(tmp_path: Path):
    with pytest.raises(TargetError, match="not in a job of Slurm's"):
        SlurmTarget("cluster").wait_for_nodes(make_job(), tmp_path, lambda text: False)


def ask_for_other_nodes(tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch, ends: str) -> list[str]:
    """Return what a run that has lost a node waits for, if scontrol ends like this on its target; Slurm ends the job at once."""

    def has_lost_one(*_: object, **__: object) -> None:
        raise LinkError("pb1: no agent answered within 8 s")

    write_program(slurm.folder / "bin/scontrol", f"#!/bin/sh\n{ends}\n")
    monkeypatch.setattr(allocation, "open_nodes", has_lost_one)
    for name, value in {"ID": "7", "NODELIST": "pb[0-1]", "NUM_NODES": "2", "CPUS_PER_NODE": "1(x2)"}.items():
        monkeypatch.setenv(f"SLURM_JOB_{name}", value)
    folder, fd = make_run(tmp_path / "ws" / "runs")
    os.close(fd)
    told: list[str] = []
    found = SlurmTarget("cluster").wait_for_nodes(
        make_job(max_restarts=1), folder.path, lambda text: told.append(text) or True
    )
    assert found is None
    return told


def test_requeue_succeeds_even_if_it_kills_the_calling_scontrol(
    tmp_path: Path, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
):
    assert ask_for_other_nodes(tmp_path, slurm, monkeypatch, "kill -TERM $$") == ["requeued by Slurm"]
    with pytest.raises(EngineError, match=r"within 8 s\. The job can't be requeued to get other nodes: Job is dead\."):
        ask_for_other_nodes(tmp_path / "refused", slurm, monkeypatch, "echo Job is dead >&2; exit 1")


def test_slurm_preview_lists_every_node(slurm: FakeSlurm):
    job = make_job(node_count=2, process_count_per_node=2, distributed_backend="gloo")
    found = SlurmTarget("cluster", {"cpus_per_process": 4}).preview(job)
    assert [(node.name, node.cores) for node in found.nodes] == [("cluster-0", 8), ("cluster-1", 8)]
    assert slurm.calls == []


@pytest.mark.parametrize(("state", "pulls"), [("PENDING", []), ("RUNNING", ["far/run"])])
def test_files_of_a_run_are_pulled_from_the_login_host_only_after_its_job_has_left_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str, pulls: list[str]
):
    folder, fd = make_run(tmp_path / "ws" / "runs")
    os.close(fd)
    write_json(folder.engine, {"engine": "slurm", "job_id": "7", "run_dir": "far/run", "submitted": 1.0})
    target, pulled = SlurmTarget("cluster", {"login": "login.example.org", "folder": "/far"}), []

    class Login:
        def pull(self, folder: RunFolder, run_dir: str) -> None:
            pulled.append(run_dir)

    class Query:
        answered_at = time.time() + 60

        def job(self, job_id: str, submitted: float) -> JobState:
            return JobState(job_id=job_id, state=state)

    monkeypatch.setattr(target, "_login", Login)
    monkeypatch.setattr(target, "_query", lambda folder, noted: Query())
    found = target.look(folder, store.stored(folder))
    assert (found.state, pulled) == (QUEUED if state == "PENDING" else RUNNING, pulls)


def test_slurm_is_not_queried_while_the_outputs_of_a_run_are_still_being_stored(tmp_path: Path, slurm: FakeSlurm):
    folder, fd = make_run(tmp_path / "ws" / "runs")
    write_json(folder.engine, {"engine": "slurm", "job_id": "7", "run_dir": "far/run", "submitted": 1.0})
    write_json(folder.home, {"host": "", "folders": {}, "end": {}})
    target = SlurmTarget("cluster", {"login": "login.example.org", "folder": "/far"})
    assert target.look(folder, store.stored(folder)).state == RUNNING
    target.cancel(folder, store.stored(folder))
    assert slurm.calls == []
    os.close(fd)
