"""A pipeline's controller that is killed, and one whose pipeline goes away."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

import paceline as pl
from paceline.pipelines.controller import PipelineController
from paceline.runs import states
from paceline.runs.claim import Claim
from paceline.system import processes
from tests.helpers import remove_in_use
from tests.pipelines.conftest import Place
from tests.sweeps.helpers import until

Submit = Callable[..., pl.PipelineRun]


@pytest.mark.promise("controller-killed-goes-step-lost")
def test_killed_pipeline_controller_is_restarted_when_the_pipelines_status_is_read(
    place: Place, submit: Submit
) -> None:
    data, go = pl.PipelineData("data"), place.top / "go"
    first = place.step("first", f"wait={go}", ("out=", data), outputs=[data])
    run = submit(first, place.step("second", ("in=", data)), place.step("other"))
    until(
        lambda: (
            {row["status"] for row in run.step_rows() if row["step"] != "second"} == {states.RUNNING, states.COMPLETED}
        )
    )
    for _ in range(2):
        pid = run.record().owner["pid"]
        os.kill(pid, signal.SIGKILL)
        until(lambda pid=pid: not processes.is_alive(pid))
        # Reading the status starts another controller.
        until(lambda pid=pid: run.record().owner["pid"] != pid and run.status == states.RUNNING)
    go.touch()
    assert run.wait_for_completion().status == states.COMPLETED
    # Every step ran exactly once.
    assert place.ran() == {"first": "x", "other": "x", "second": "x"}
    assert run.steps["second"].get_metrics() == {"value": 2}
    assert "going on with 2 of 3 steps, of which 1 run" in (run.folder.logs / "driver.log").read_text()


def test_pipeline_fails_if_the_run_folder_of_a_step_is_deleted_manually(place: Place, submit: Submit) -> None:
    run = submit(place.step("first", f"wait={place.top / 'never'}"), place.step("other", f"wait={place.top / 'never'}"))
    until(lambda: [row["status"] for row in run.step_rows()] == [states.RUNNING] * 2)
    # A step is Running before its script has started. Wait until both scripts have written into their run folders.
    until(lambda: place.ran() == {"first": "x", "other": "x"})
    remove_in_use(run.steps["first"].folder.path)
    record = run.wait_for_completion(raise_on_error=False)
    assert record.status == states.FAILED
    assert record.failure is not None
    assert f"step 'first' is gone: its run {run.id}_0 was removed" in record.failure.message
    assert run.steps["other"].status == states.CANCELED
    # The scripts of the removed run must end by themselves: Paceline can't end them without the run folder.
    (place.top / "never").touch()


def test_pipeline_controller_cancels_steps_and_exits_if_the_pipeline_folder_is_deleted(
    place: Place, submit: Submit
) -> None:
    run = submit(place.step("first", f"wait={place.top / 'never'}"))
    until(lambda: [row["status"] for row in run.step_rows()] == [states.RUNNING])
    pid, step = run.record().owner["pid"], run.steps["first"]
    remove_in_use(run.folder.path)
    until(lambda: not processes.is_alive(pid))
    until(lambda: step.status == states.CANCELED)
    assert step.tags["stopped"] == "the pipeline's folder is gone"


class TakenOverError(Exception):
    """The error in the place of the end of a process whose run another process has taken over."""


def _raise_if_lost(claim: Claim) -> None:
    if claim.is_lost():
        raise TakenOverError


def test_pipeline_controller_without_its_claim_starts_and_cancels_no_step_and_writes_no_end(
    place: Place, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = submit(place.step("first", f"wait={place.top / 'go'}"), place.step("other", f"wait={place.top / 'go'}"))
    until(lambda: [row["status"] for row in run.step_rows()] == [states.RUNNING] * 2)
    pid = run.record().owner["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        found = PipelineController(run.folder)
        found.take_up()
        before, own = run.folder.state.read_bytes(), run.folder.lock.read_bytes()
        assert own.startswith(f"process {pid} on ".encode())
        monkeypatch.setattr(Claim, "check", _raise_if_lost)
        with pytest.raises(TakenOverError):
            found.stop_all("the pipeline is canceled")
        with pytest.raises(TakenOverError):
            found.write_end()
        found.state.steps[0].status = None
        with pytest.raises(TakenOverError):
            found.advance()
        assert run.folder.state.read_bytes() == before
        assert not run.steps["first"].folder.cancel_request.exists()
    finally:
        os.kill(pid, signal.SIGCONT)
    (place.top / "go").touch()
    assert run.wait_for_completion().status == states.COMPLETED
    assert place.ran() == {"first": "x", "other": "x"}
