from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

from paceline.errors import FileNameError, RunFailedError, RunNotFoundError, RunStateError, UserError
from paceline.runs import states, store
from paceline.runs.context import WorkerContext
from paceline.runs.failure import FailureReport
from paceline.runs.metrics import MetricLog
from paceline.workspace import Experiment, Run, Workspace
from tests.helpers import RUN_ID, make_run, write_tree


@pytest.fixture
def experiment():
    return Experiment(Workspace("ws"), "digits")


@pytest.fixture
def submitted(experiment):
    """A run with a supervisor, as far as anybody can see: this process."""
    folder, fd = make_run(
        experiment.runs_dir, status=states.RUNNING, target="local", submitted_by="me", snapshot_id="5" * 64
    )
    yield Run(experiment, folder.run_id)
    os.close(fd)


def end(run: Run, status: str, **changes: object) -> None:
    store.change(run.folder, store.stored(run.folder), status, **changes)


# --- Handles


def test_handles_of_one_run_are_equal(experiment, submitted):
    assert Run(experiment, RUN_ID) == Run.get(experiment.workspace, "digits_17") == submitted
    assert len({Run(experiment, RUN_ID), submitted}) == 1
    assert repr(submitted) == f"Run(experiment='digits', id={RUN_ID!r}, status='Running')"


@pytest.mark.parametrize(("run_id", "error"), [("nowhere", RunNotFoundError), ("../x", FileNameError)])
def test_run_handle_for_a_missing_or_invalid_id_is_refused(experiment, run_id, error):
    with pytest.raises(error):
        Run(experiment, run_id)


def test_run_handle_shows_the_current_state(submitted):
    assert submitted.status == "Running"
    end(submitted, states.FINALIZING)
    assert submitted.status == "Finalizing"


# --- Names and numbers of runs


def test_runs_are_numbered_in_the_order_they_were_made(experiment):
    # Regression: runs that were created within one second were listed in random order.
    runs = [experiment.start_logging() for _ in range(8)]
    assert [run.number for run in runs] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [run.id for run in experiment.get_runs()] == [run.id for run in reversed(runs)]
    for run in runs:
        run.complete()


def test_run_number_in_experiment_digits_does_not_count_runs_of_experiment_digits_big(experiment):
    # Regression: runs of "digits_big" were counted as runs of "digits".
    with Experiment(experiment.workspace, "digits_big").start_logging(), experiment.start_logging() as run:
        assert run.number == 1


def test_child_run_with_a_custom_id_has_a_number(experiment):
    with experiment.start_logging() as parent, parent.child_run(run_id="by-hand") as child:
        assert isinstance(child.number, int)


def test_tags_properties_and_display_name_are_stored(submitted):
    submitted.tag("lr", 0.1)
    submitted.set_tags({"best": None, "n": 2})
    submitted.remove_tags(["n"])
    submitted.add_properties({"commit": "abc"})
    assert submitted.name == submitted.display_name
    assert re.fullmatch(r"[a-z]+-[a-z]+-\d+", submitted.name)
    submitted.display_name = "first try"
    submitted.description = "what it is for"
    assert submitted.tags == {"lr": "0.1", "best": None}
    assert submitted.properties == {"commit": "abc"}
    assert (submitted.name, submitted.description) == ("first try", "what it is for")


def test_remove_tags_accepts_a_single_name(submitted):
    submitted.set_tags({"lr": 1, "l": 2, "r": 3})
    submitted.remove_tags("lr")
    assert submitted.tags == {"l": "2", "r": "3"}


# --- Logs and source of a run


def test_get_all_logs_copies_every_log(submitted):
    write_tree(submitted.folder.logs, {"rank_0.log": "a", "driver.log": "b"})
    assert sorted(map(str, submitted.get_all_logs("to"))) == ["to/logs/driver.log", "to/logs/rank_0.log"]
    assert Path("to/logs/rank_0.log").read_text() == "a"


def test_restore_of_a_run_without_a_snapshot_is_refused(submitted):
    with pytest.raises(RunStateError, match="has no snapshot"):
        submitted.restore_snapshot("back")


def test_a_snapshot_is_not_restored_over_a_folder(experiment, tmp_path):
    write_tree(tmp_path, {"code/a": "", "there/b": ""})
    with experiment.start_logging(snapshot_directory="code") as run:
        with pytest.raises(UserError, match="'there' exists"):
            run.restore_snapshot("there")
        assert Path(run.restore_snapshot()).name == run.record().snapshot_id


# --- Waiting for the end of a run


def test_wait_for_completion_of_a_completed_run_returns_its_record(submitted):
    end(submitted, states.COMPLETED)
    assert submitted.wait_for_completion().status == "Completed"


def test_wait_for_completion_of_a_failed_run_raises_its_failure_report(submitted):
    report = FailureReport(cause="exception", message="rank 1 failed first", victims=((0, "was lost"),))
    end(submitted, states.FAILED, failure=report)
    with pytest.raises(RunFailedError) as raised:
        submitted.wait_for_completion()
    assert raised.value.report == report
    assert str(report) in str(raised.value)
    assert isinstance(raised.value, RuntimeError)
    assert submitted.wait_for_completion(raise_on_error=False).status == "Failed"


def test_wait_for_completion_of_a_canceled_run_does_not_raise(submitted):
    end(submitted, states.CANCELED)
    assert submitted.wait_for_completion().status == "Canceled"


def test_wait_for_completion_returns_when_the_run_ends(submitted):
    timer = threading.Timer(0.2, lambda: end(submitted, states.COMPLETED))
    timer.start()
    assert submitted.wait_for_completion().status == "Completed"
    timer.join()


def test_wait_for_completion_with_show_output_prints_the_log(submitted, capsys):
    write_tree(submitted.folder.attempt(1), {"rank_0.log": "epoch 1\nepoch 2"})
    end(submitted, states.COMPLETED, started_utc="2026-01-02T03:04:05.000Z", ended_utc="2026-01-02T03:04:07.500Z")
    submitted.wait_for_completion(show_output=True)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"RunId: {RUN_ID}"
    assert shown[-3:] == ["epoch 1", "epoch 2", "-- Completed in 2.5 s"]


def test_ctrl_c_during_wait_for_completion_does_not_cancel_the_run(submitted, capsys, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        submitted.wait_for_completion()
    assert f"paceline cancel {RUN_ID}" in capsys.readouterr().err
    assert submitted.status == "Running"


# --- A submitted run ends with its script


@pytest.mark.parametrize("call", ["complete", "fail", "start"])
def test_complete_and_fail_called_by_a_worker_are_ignored(submitted, call):
    submitted._worker = WorkerContext(submitted.folder.path, 0, 1, 1)
    getattr(submitted, call)()
    assert submitted.status == "Running"


def test_cancel_of_a_running_run_sets_the_state_cancel_requested(submitted):
    submitted.cancel()
    assert submitted.status == "CancelRequested"


def test_cancel_of_an_ended_run_changes_nothing(submitted):
    end(submitted, states.COMPLETED)
    submitted.cancel()
    assert submitted.status == "Completed"
    assert not submitted.folder.cancel_request.exists()


# --- Child runs


def test_child_runs_have_their_parent(experiment):
    with experiment.start_logging() as parent:
        with parent.child_run("first") as child:
            child.log("loss", 1)
            with child.child_run() as grandchild:
                grandchild.log("loss", 2)
        assert (child.parent, grandchild.parent, parent.parent) == (parent, child, None)
        assert child.name == "first"
        assert list(parent.get_children()) == [child]
        assert set(parent.get_children(recursive=True)) == {child, grandchild}
        metrics = parent.get_metrics(recursive=True)
        assert metrics == {parent.id: {}, child.id: {"loss": 1}, grandchild.id: {"loss": 2}}


def test_create_children_creates_several_child_runs(experiment):
    with experiment.start_logging() as parent:
        counted = parent.create_children(count=3)
        tagged = parent.create_children(tag_key="fold", tag_values=["a", "b"])
        assert [child.tags for child in counted] == [{"azureml.batch_child_number": str(number)} for number in range(3)]
        assert [child.tags for child in tagged] == [{"fold": "a"}, {"fold": "b"}]
        assert {child.status for child in counted} == {"NotStarted"}
        counted[0].start()
        counted[0].start()
        assert counted[0].status == "Running"
        for child in counted + tagged:
            child.complete()
        assert [child.id for child in parent.get_children(tags={"fold": "b"})] == [tagged[1].id]
        assert len(list(parent.get_children(status="Completed"))) == 5
        assert list(parent.get_children(kind="script")) == []


@pytest.mark.parametrize("arguments", [{}, {"count": 1, "tag_values": ["a"], "tag_key": "k"}, {"tag_values": ["a"]}])
def test_create_children_refuses_both_or_neither_of_count_and_tags(experiment, arguments):
    with experiment.start_logging() as parent, pytest.raises(UserError, match="create_children"):
        parent.create_children(**arguments)


# --- Lists of runs


@pytest.fixture
def several(experiment):
    """name -> run: two completed ones, one failed, a child, and one of another experiment."""
    runs = {name: experiment.start_logging(display_name=name) for name in ("plain", "tagged", "failed")}
    runs["tagged"].tag("lr", 0.1)
    runs["tagged"].add_properties({"commit": "abc"})
    runs["child"] = runs["tagged"].child_run()
    runs["other"] = Experiment(experiment.workspace, "other").start_logging()
    runs["failed"].fail("no")
    for run in runs.values():
        run.complete()
    return runs


@pytest.mark.parametrize(
    ("filters", "names"),
    [
        ({}, ["plain", "tagged", "failed"]),
        ({"include_children": True}, ["plain", "tagged", "failed", "child"]),
        ({"tags": "lr"}, ["tagged"]),
        ({"tags": {"lr": "0.1"}}, ["tagged"]),
        ({"tags": {"lr": "0.2"}}, []),
        ({"properties": {"commit": "abc"}}, ["tagged"]),
        ({"status": "Failed"}, ["failed"]),
        ({"status": "Completed"}, ["plain", "tagged"]),
        ({"kind": "interactive"}, ["plain", "tagged", "failed"]),
        ({"kind": "script"}, []),
    ],
    ids=str,
)
def test_get_runs_returns_only_runs_that_match_its_filters(experiment, several, filters, names):
    assert {run.id for run in experiment.get_runs(**filters)} == {several[name].id for name in names}


# --- Metrics of a run


def test_get_metrics_returns_values_by_rank_or_of_one_rank(submitted):
    for rank in (0, 1):
        log = MetricLog(submitted.folder.metric_log(rank))
        log.scalar("loss", rank + 0.5)
        log.close()
    assert submitted.get_metrics(by_rank=True) == {"0": {"loss": 0.5}, "1": {"loss": 1.5}}
    assert submitted.get_metrics(rank=1) == {"loss": 1.5}
    assert submitted.get_metrics("loss") == {"loss": [0.5, 1.5]}


def test_fail_on_a_submitted_run_requests_its_cancellation(submitted):
    submitted.fail("no good", error_code="E5")
    assert submitted.status == states.CANCEL_REQUESTED
    record = store.change(submitted.folder, store.stored(submitted.folder), states.CANCELED, exit_code=143)
    assert (record.status, record.exit_code, str(record.failure.message)) == (states.FAILED, 1, "E5: no good")
    submitted.fail("again")
    assert submitted.failure.message == "E5: no good"
