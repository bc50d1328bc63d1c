"""Runs whose lost workers start again alone, while the others stay (`on_failure="replace"`)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from paceline.runs import states
from paceline.system import processes
from paceline.system.files import read_json
from tests.engines.lab import Lab, wait_for_end, wait_for_file
from tests.engines.replacing import PARALLEL, REASONS, SIZE, TRAINS, WORLD, Training, assert_same
from tests.helpers import wait_until


@pytest.mark.promise("only-lost-workers-start-again")
@pytest.mark.usefixtures("torch_at_hand")
@pytest.mark.parametrize("victims", [(0,), (1,), (2,), (1, 2), (0, 2)], ids=str)
@pytest.mark.parametrize("script", [TRAINS, PARALLEL], ids=["horovod", "parallelize"])
def test_only_lost_workers_start_again_and_the_result_is_the_same(
    lab: Lab, tmp_path: Path, script: str, victims: tuple[int, ...]
) -> None:
    training = Training(lab, tmp_path / "marks", script=script)
    before = training.wait_for_step()
    training.kill(*(before[rank] for rank in victims))
    after = training.wait_for_step()
    assert [old != new for old, new in zip(before, after, strict=True)] == [rank in victims for rank in range(SIZE)]
    assert_same(training)
    # In the script `PARALLEL`, a new rank has no score of its own from an earlier epoch, so it gets the score from
    # another rank. Then all ranks have the same score.
    assert len({path.read_text() for path in training.run.folder.outputs.glob("score_*.json")}) == (script == PARALLEL)
    (attempt,) = training.run.record().attempts
    assert [(one["ranks"], one["cause"]) for one in attempt.replaced] == [([*victims], "killed")]
    assert dict(attempt.exit_codes) == {"0": 0, "1": 0, "2": 0}


#: The main thread of a worker ends for which a mark is there. A killed worker with several threads also ends in such steps:
#: its parent can't see its exit code until the last thread has ended.
HALF = """
        if os.path.exists(f"{marks}/half_{hvd.rank()}") and os.environ["PACELINE_GENERATION"] == "0":
            import ctypes, threading
            def die():
                while not os.path.exists(f"{marks}/end"):
                    time.sleep(0.02)
                os.kill(os.getpid(), 9)
            threading.Thread(target=die).start()
            ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
"""


@pytest.mark.promise("only-lost-workers-start-again")
def test_worker_that_is_still_ending_is_replaced_together_with_another_lost_worker(lab: Lab, tmp_path: Path) -> None:
    script = TRAINS.replace("        state.commit()\n", f"{HALF.lstrip(chr(10))}        state.commit()\n")
    training = Training(lab, tmp_path / "marks", script=script)
    before = training.wait_for_step()
    (training.marks / "half_2").touch()
    wait_until(lambda: not processes.is_alive(before[2]), "the main thread of rank 2 has ended", 60)
    training.kill(before[1])
    time.sleep(1)  # The supervisor sees the loss of rank 1 meanwhile, and a second loss would come too late for it.
    (training.marks / "end").touch()
    after = training.wait_for_step()
    assert [old != new for old, new in zip(before, after, strict=True)] == [False, True, True]
    (attempt,) = training.run.record().attempts
    assert [(one["ranks"], one["cause"]) for one in attempt.replaced] == [([1, 2], "killed")]
    training.finish()


@pytest.mark.promise("only-lost-workers-start-again")
def test_repeated_losses_use_up_max_restarts_and_leave_no_children(lab: Lab, tmp_path: Path) -> None:
    training = Training(lab, tmp_path / "marks", "forks", max_restarts=3, warm="auto")
    for victim in (2, 0, 1):
        pids = training.wait_for_step()
        child = int((training.marks / f"child_{victim}").read_text())
        training.kill(pids[victim])
        wait_until(lambda child=child: not processes.is_alive(child), "the lost worker's child is killed", 60)  # type: ignore[misc]
    training.wait_for_step()
    (attempt,) = training.run.record().attempts
    assert [one["ranks"] for one in attempt.replaced] == [[2], [0], [1]]
    training.kill(training.steps(1)[-1]["pid"])
    assert wait_for_end(training.run) == states.FAILED
    assert training.run.failure is not None
    assert (training.run.failure.cause, training.run.failure.rank) == ("killed", 1)
    assert len(training.run.record().attempts) == 1


@pytest.mark.promise("only-lost-workers-start-again")
def test_workers_of_all_ranks_are_replaced_by_forks_of_the_warm_process(lab: Lab, tmp_path: Path) -> None:
    training = Training(lab, tmp_path / "marks", warm="auto")
    log = training.run.folder.driver_log
    wait_until(lambda: "a warm process is ready" in log.read_text(), "the warm process is ready", 120)
    for victim in (2, 0, 1):
        pids = training.wait_for_step()
        training.kill(pids[victim])
        pids = training.wait_for_step()
        # A fork has the arguments of the process that it was forked from.
        assert b"--spare" in Path(f"/proc/{pids[victim]}/cmdline").read_bytes()
    training.finish()


@pytest.mark.promise("else-all-workers-start-again")
@pytest.mark.usefixtures("torch_at_hand")
@pytest.mark.parametrize("is_new", [True, False], ids=["the new worker", "a worker that stays"])
@pytest.mark.parametrize("script", [TRAINS, PARALLEL], ids=["horovod", "parallelize"])
def test_second_worker_loss_during_a_replacement_restarts_all_workers(
    lab: Lab, tmp_path: Path, script: str, is_new: bool
) -> None:
    training = Training(lab, tmp_path / "marks", "slow", script=script)
    before = training.wait_for_step()
    training.kill(before[1])
    new = int(wait_for_file(training.marks / "waits"))
    training.kill(new if is_new else before[2])
    after = training.wait_for_step()
    assert not {*before, new} & {*after}
    assert_same(training)
    first, second = training.run.record().attempts
    assert [one["ranks"] for one in first.replaced] == [[1]]
    assert (first.cause, second.cause, second.replaced) == ("killed", None, ())
    assert second.reason == (
        "restart after killed; all workers start again: another worker was lost before all ranks had met again"
    )


#: This script waits in its first attempt until a worker is lost.
PLAIN = """
import os, time
while os.environ["PACELINE_ATTEMPT"] == "1":
    time.sleep(0.05)
"""
#: Script -> the reason in the run's record why one lost worker can't be replaced, so all workers start again.
ALONE = (
    (PLAIN, "rank 0 was neither in hvd.elastic.run nor past its first step of parallelize"),
    (
        TRAINS.replace("log = os.open", "hvd.broadcast_parameters(net.state_dict(), root_rank=0)\nlog = os.open"),
        "the ranks communicate before hvd.elastic.run, which a new rank can't repeat alone",
    ),
    (
        TRAINS.replace("hvd.init()", "hvd.init()\nhvd.shutdown()\nhvd.init()"),
        "the script calls hvd.init() several times before hvd.elastic.run",
    ),
)


@pytest.mark.promise("else-all-workers-start-again")
@pytest.mark.usefixtures("torch_at_hand")
@pytest.mark.parametrize(("script", "reason"), ALONE, ids=["plain", "communicates", "init twice"])
def test_all_workers_restart_and_the_record_says_why_if_a_lost_worker_cannot_be_replaced_alone(
    lab: Lab, tmp_path: Path, script: str, reason: str
) -> None:
    training = Training(lab, tmp_path / "marks", script=script)
    if script == PLAIN:
        wait_until(lambda: training.run.status == states.RUNNING, "the run is running", 60)
        pid = read_json(training.run.folder.worker_start(1, 1))["pid"]
    else:
        pid = training.wait_for_step()[1]
    training.kill(pid)
    wait_until(lambda: len(training.run.record().attempts) == 2, "another attempt", 60)
    first, second = training.run.record().attempts
    assert (first.replaced, second.reason) == ((), f"restart after killed; all workers start again: {reason}")
    assert f"all workers start again: {reason}." in training.run.folder.driver_log.read_text()
    (training.marks / "fast").touch()
    assert wait_for_end(training.run) == states.COMPLETED


#: Ends a worker of the first generation by SIGKILL at the moment `{name}`, once.
DIES = """
def die(name):
    if name == {name!r} and os.environ["PACELINE_ATTEMPT"] == "1" and not is_new and os.environ["RANK"] == {rank!r}:
        os.kill(os.getpid(), 9)
"""
#: Moments at the beginning and the end of a training, and whether the lost worker alone starts again. After the last step
#: the other workers are already inside the last save.
MOMENTS = [
    ("in the first step", False),
    ("after the last step", True),
    pytest.param("after parallelize()", False, marks=pytest.mark.proof),
    pytest.param("in the last step", True, marks=pytest.mark.proof),
    pytest.param("after the last save", False, marks=pytest.mark.proof),
]


@pytest.mark.promise("only-lost-workers-start-again")
@pytest.mark.usefixtures("torch_at_hand")
@pytest.mark.parametrize(("moment", "is_alone"), MOMENTS, ids=str)
def test_loss_in_the_first_or_last_step_does_not_change_the_result(
    lab: Lab, tmp_path: Path, moment: str, is_alone: bool
) -> None:
    rank = len(moment) % SIZE
    script = PARALLEL.replace("torch.manual_seed(3", DIES.format(name=moment, rank=str(rank)) + "torch.manual_seed(3")
    loss = "lambda out, y: (die(now[0]), torch.nn.functional.mse_loss(out, y))[1]"
    script = script.replace("loss=torch.nn.functional.mse_loss", f"loss={loss}").replace("par = ", "now = ['']\npar = ")
    begins = "now[0] = {0: 'in the first step', end - 1: 'in the last step'}.get(par.progress.steps, '')"
    script = script.replace("average = ", "die('after parallelize()')\naverage = ").replace(
        "        loss = par.step", f"        {begins}\n        loss = par.step"
    )
    last = "        if step == end:\n            die('after the last step')\n"
    script = script.replace("        par.save(every=50", f"{last}        par.save(every=50")
    script = script.replace("par.wait()\n", "die('after the last save')\npar.wait()\n")
    training = Training(lab, tmp_path / "marks", "fast", script=script)
    training.script = PARALLEL  # of the undisturbed run
    assert_same(training)
    attempts = training.run.record().attempts
    assert [[*one["ranks"]] for one in attempts[0].replaced] == ([[rank]] if is_alone else [])
    assert len(attempts) == (1 if is_alone else 2)
    if not is_alone:
        assert "restart after killed; all workers start again: " in (attempts[1].reason or "")


@pytest.mark.promise("else-all-workers-start-again")
@pytest.mark.usefixtures("torch_at_hand")
def test_loss_during_an_evaluation_restarts_all_workers(lab: Lab, tmp_path: Path) -> None:
    waits = """
    class Slow:
        def __iter__(self):
            time.sleep(600)
            yield
    if epoch == 1 and os.environ["PACELINE_ATTEMPT"] == "1":
        par.evaluate(Slow())
"""
    script = PARALLEL.replace("par.wait()\n", f"{waits.lstrip(chr(10))}par.wait()\n")
    training = Training(lab, tmp_path / "marks", script=script, grace_period_seconds=1)
    pids = training.wait_for_step(4)
    report = training.run.folder.worker_group(1, 0)
    wait_until(lambda: (read_json(report) or {}).get("why_not"), "rank 0 reports its evaluation", 60)
    training.kill(pids[1])
    wait_until(lambda: len(training.run.record().attempts) == 2, "another attempt", 60)
    first, second = training.run.record().attempts
    reason = "restart after killed; all workers start again: a worker was lost while rank 0 was in evaluate()"
    assert (first.replaced, second.reason) == ((), reason)
    (training.marks / "fast").touch()
    assert wait_for_end(training.run) == states.COMPLETED


@pytest.mark.promise("else-all-workers-start-again")
@pytest.mark.usefixtures("torch_at_hand")
def test_training_reports_beforehand_why_a_lost_worker_cannot_be_replaced_alone(lab: Lab) -> None:
    values = {**WORLD, "process_count_per_node": 2, "on_failure": "replace", "max_restarts": 1}
    run = lab.submit(REASONS, **values)
    assert wait_for_end(run) == states.COMPLETED, run.failure
    ways = "the ranks compare the loader's batches, or rank 0 draws their order"
    expected = {
        "fine": "",
        "a loader": "",
        "no load": "the script calls step() before par.load() and its first step",
        "a path": "the script calls save() before par.load() and its first step",
        "early": "the script calls evaluate() between par.load() and its first step",
        "a scheduler": "load() was not given the script's learning-rate scheduler",
        "a counter": "the model's forward changes plain attributes of its modules",
        "a loss": "the loss has buffers, which no checkpoint keeps",
        "a list": ways,
        "a sampler": ways,
        "a layout": "with the layout 'shard 2' a lost rank had a part of the state alone",
        "auto": "strategy='auto' measures with all ranks; name the strategy that par.explain() shows",
        "messages": "the script communicates beside the calls of its training",
        "elsewhere": "a worker was lost while rank {} was in evaluate()",
    }
    for rank in range(2):
        found = read_json(run.folder.outputs / f"reasons_{rank}.json")
        assert found == {name: why.format(rank) for name, why in expected.items()}
