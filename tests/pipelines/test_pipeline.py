"""Pipelines from their submission to their end, on this machine."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.errors import JobError, PipelineError, RunFailedError
from paceline.pipelines import reuse
from paceline.pipelines.spec import StepSpec
from paceline.pruning import snapshots
from paceline.runs import states
from tests.helpers import make_job, write_tree
from tests.pipelines.conftest import Place
from tests.sweeps.helpers import hide_matplotlib, until

Submit = Callable[..., pl.PipelineRun]


def chain(place: Place, add: int) -> list[pl.Step]:
    """Two steps: what the first leaves the second takes, and leaves something itself."""
    clean, model = pl.PipelineData("clean"), pl.PipelineData("model")
    first = place.step("prepare", ("out=", clean), outputs=[clean])
    second = place.step("train", ("in=", clean), f"add={add}", ("out=", model), outputs=[model])
    return [first, second]


@pytest.mark.promise("step-leaves-next-one-finds")
def test_steps_pass_outputs_and_unchanged_steps_are_reused(place: Place, submit: Submit) -> None:
    steps = chain(place, add=10)
    model = steps[1].outputs[0]
    # Submitting the last step also submits the steps whose data it uses.
    run = submit(steps[1], outputs={"best": model})
    assert run.kind == "pipeline"
    assert run.wait_for_completion().status == states.COMPLETED
    assert [(row["step"], row["status"], row["after"]) for row in run.step_rows()] == [
        ("prepare", states.COMPLETED, []),
        ("train", states.COMPLETED, ["prepare"]),
    ]
    train = run.steps["train"]
    assert train.get_metrics() == {"value": 12}
    assert train.display_name == "train"
    assert train.parent == run
    assert [child.id for child in run.get_children()] == [f"{run.id}_1", f"{run.id}_0"]
    target = place.top / "got"
    source = run.output("best").sources[0]
    pl.Datastore.get(place.workspace, source.datastore).download(target, source.path)
    assert (target / source.path / "value.txt").read_text() == "12"
    assert source.path == f"pipelines/{run.id}_1/model"

    # A second submission without changes runs no step. Its run also has the outputs of the first run.
    again = submit(*chain(place, add=10))
    again.wait_for_completion()
    assert [row["reused_from"] for row in again.step_rows()] == [f"{run.id}_0", f"{run.id}_1"]
    assert again.steps["train"].get_metrics() == {"value": 12}
    assert (again.steps["train"].folder.outputs / "note.txt").read_text() == "12"
    assert again.output("model").sources == run.output("best").sources
    assert "step train is reused: nothing has changed since" in (again.folder.logs / "driver.log").read_text()

    # With another argument of `train`, only this step runs. It uses the output that the first run has stored.
    changed = submit(*chain(place, add=20))
    changed.wait_for_completion()
    assert [row["reused_from"] for row in changed.step_rows()] == [f"{run.id}_0", None]
    assert changed.steps["train"].get_metrics() == {"value": 22}

    # With changed source files, both steps run. They also run if users pass `regenerate_outputs`.
    (place.source / "more.txt").write_text("changed")
    for options in ({}, {"regenerate_outputs": True}):
        fresh = submit(*chain(place, add=20), **options)
        fresh.wait_for_completion()
        assert [row["reused_from"] for row in fresh.step_rows()] == [None, None]
    # No step is reused after the stored outputs of former runs were removed.
    shutil.rmtree(place.workspace.path / "data" / "pipelines")
    fresh = submit(*chain(place, add=20))
    fresh.wait_for_completion()
    assert [row["reused_from"] for row in fresh.step_rows()] == [None, None]
    assert place.ran() == {"prepare": "xxxx", "train": "xxxxx"}


@pytest.mark.promise("steps-do-need-other-run")
def test_independent_pipeline_steps_run_concurrently_and_use_parameter_values_given_at_submission(
    place: Place, submit: Submit
) -> None:
    one, other = place.top / "one", place.top / "other"
    # Each step waits for the other one, so they would never end one after the other.
    left = place.step("left", f"meet={one}={other}")
    right = place.step("right", f"meet={other}={one}")
    estimator = pl.Estimator(
        place.source,
        entry_script="step.py",
        script_params={"add=5": "", "": pl.PipelineParameter("more", "add=1")},
        environment_variables={"RAN": str(place.top / "ran"), "STEP": "last"},
    )
    last = pl.Step("last", estimator, after=[left, right])
    run = submit(left, [right, last], pipeline_parameters={"more": "add=7"})
    run.wait_for_completion()
    assert run.spec.parameters == {"more": "add=7"}
    assert run.steps["last"].get_metrics() == {"value": 13}
    assert run.step_rows()[2]["after"] == ["left", "right"]


@pytest.mark.promise("failed-step-ends-pipeline-cause")
def test_failed_step_cancels_independent_steps_unless_continue_on_step_failure_is_set(
    place: Place, submit: Submit
) -> None:
    never = place.top / "never"
    bad, slow = place.step("bad", "fail"), place.step("slow", f"wait={never}")
    after = place.step("after", after=[bad])
    run = submit(bad, slow, after)
    with pytest.raises(
        RunFailedError, match=r"step 'bad' \(.*_0\) failed: ValueError: no luck with this one"
    ) as caught:
        run.wait_for_completion()
    assert caught.value.report is not None
    assert caught.value.report.cause == "step"
    assert "Not begun: after." in caught.value.report.message
    assert [row["status"] for row in run.step_rows()] == [states.FAILED, states.CANCELED, "Skipped"]
    assert run.steps["slow"].tags["stopped"] == "step 'bad' has failed"
    assert run.record().exit_code == 1

    never.touch()
    run = submit(bad, slow, after, continue_on_step_failure=True)
    assert run.wait_for_completion(raise_on_error=False).status == states.FAILED
    assert [row["status"] for row in run.step_rows()] == [states.FAILED, states.COMPLETED, "Skipped"]


@pytest.mark.promise("cancel-pipeline-steps")
def test_canceling_a_pipeline_cancels_its_steps(place: Place, submit: Submit) -> None:
    never = place.top / "never"
    first, second = place.step("first", f"wait={never}"), place.step("second", f"wait={never}")
    run = submit(first, second, place.step("third", after=[first]))
    until(lambda: [row["status"] for row in run.step_rows()][:2] == [states.RUNNING] * 2)
    run.cancel()
    record = run.wait_for_completion()
    assert (record.status, record.canceled_by is not None) == (states.CANCELED, True)
    assert [row["status"] for row in run.step_rows()] == [states.CANCELED, states.CANCELED, "Skipped"]


def test_empty_step_output_is_an_empty_folder_for_the_next_step(place: Place, submit: Submit) -> None:
    data = pl.PipelineData("nothing")
    first = place.step("first", outputs=[data])
    code = "import os, sys; assert os.listdir(sys.argv[1]) == []"
    (place.source / "look.py").write_text(code)
    look = pl.Step("look", pl.Estimator(place.source, entry_script="look.py", arguments=[data]))
    run = submit(first, look)
    assert run.wait_for_completion(raise_on_error=False).failure is None


@pytest.mark.promise("sweep-step")
def test_sweep_can_be_a_pipeline_step(place: Place, submit: Submit) -> None:
    clean = pl.PipelineData("clean")
    first = place.step("prepare", ("out=", clean), outputs=[clean])
    (place.source / "tune.py").write_text(
        "import sys, paceline\n"
        "value = int(open(sys.argv[1] + '/value.txt').read())\n"
        "paceline.Run.get_context().log('score', value * float(sys.argv[sys.argv.index('--x') + 1]))\n"
    )
    tuned = pl.Sweep(
        pl.Estimator(place.source, entry_script="tune.py", arguments=[clean]),
        {"--x": pl.choice(2, 3)},
        metric="score",
        sampler="grid",
        trials=2,
    )
    hide_matplotlib(place.workspace.path)
    run = submit(first, pl.Step("tune", tuned), place.step("last", after=[first]))
    run.wait_for_completion()
    sweep = run.steps["tune"]
    assert isinstance(sweep, pl.SweepRun)
    assert sweep.best_child().get_metrics() == {"score": 3.0}
    assert sweep.best_child().id == f"{run.id}_1_1"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda place: pl.Pipeline([]), "a pipeline without steps"),
        (lambda place: pl.Pipeline(list[Any](["prepare"])), "'prepare' is not a step"),
        (lambda place: pl.Pipeline([place.step("a"), place.step("a")]), "two steps are called 'a'"),
        (
            lambda place: pl.Pipeline([place.step("a", ("in=", pl.PipelineData("raw")))]),
            "'a' takes 'raw', which no step",
        ),
        (lambda place: pl.Step("a/b", pl.Estimator(place.source, entry_script="step.py")), "step name 'a/b'"),
        (lambda place: pl.Step("a", "train.py"), "step 'a' is a str. Give an Estimator"),
        (lambda place: pl.PipelineData("1st"), "the name '1st' of a pipeline's data"),
        (lambda place: place.step("a", outputs=pl.PipelineData("x")), "is not a list of PipelineData"),
        (lambda place: pl.PipelineParameter("", 1), "the name '' of a pipeline's parameter"),
    ],
    ids=["empty", "no step", "twice", "nobody leaves it", "name", "no estimator", "data", "outputs", "parameter"],
)
def test_invalid_pipeline_is_refused_in_its_constructor(place: Place, make: Callable[[Place], Any], said: str) -> None:
    with pytest.raises(PipelineError, match=re.escape(said)):
        make(place)


def test_cycles_and_duplicate_outputs_are_refused(place: Place) -> None:
    data = pl.PipelineData("data")
    first, second = place.step("first"), place.step("second")
    first.run_after(second.run_after(first))
    with pytest.raises(PipelineError, match=r"in a circle: first -> second -> first"):
        pl.Pipeline([first])
    with pytest.raises(PipelineError, match="steps 'a' and 'b' both leave 'data'"):
        pl.Pipeline([place.step("a", outputs=[data]), place.step("b", outputs=[data])])


def test_invalid_pipeline_submission_starts_no_run(place: Place, submit: Submit) -> None:
    step = place.step("a", pl.PipelineParameter("add", "add=1"))
    with pytest.raises(PipelineError, match=r"'ad' is given, which is not a parameter of the pipeline: it has add"):
        submit(step, pipeline_parameters={"ad": 1})
    with pytest.raises(JobError, match=r"step 'b': entry_script 'gone.py'|step 'b': .*gone.py"):
        submit(step, pl.Step("b", pl.Estimator(place.source, entry_script="gone.py")))
    estimator = pl.Estimator(
        place.source, entry_script="step.py", notify="mail:ann@example.com", notify_on="metrics.loss > 1"
    )
    with pytest.raises(JobError, match=r"step 'b': .*a pipeline has no metrics of its own"):
        submit(step, pl.Step("b", estimator))
    with pytest.raises(PipelineError, match="without script_params"):
        place.experiment.submit(pl.Pipeline([step]), script_params={})
    assert list(place.workspace.runs_dir.iterdir()) == []


@pytest.mark.promise("snapshot-step-waits-pruned")
def test_snapshots_of_waiting_steps_are_not_pruned(
    place: Place, submit: Callable[..., pl.PipelineRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tree(place.top / "other", {"last.py": "print('there')"})
    first = place.step("first", f"wait={place.top / 'go'}")
    run = submit(first, pl.Step("last", pl.Estimator(place.top / "other", entry_script="last.py"), after=[first]))
    # Let the snapshot of the last step count as old. Only the pipeline still refers to it.
    monkeypatch.setattr(snapshots, "_FRESH_S", -1.0)
    assert len([path for path in (place.workspace.path / "snapshots").iterdir() if path.name[0] != "."]) == 2
    assert snapshots.unused(place.workspace.path) == []
    (place.top / "go").touch()
    assert run.wait_for_completion().status == states.COMPLETED


def test_secrets_of_pipeline_steps_are_read_at_submission_and_each_step_gets_only_its_own_value(
    place: Place, submit: Callable[..., pl.PipelineRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIRST_TOKEN", "one")
    monkeypatch.setenv("SECOND_TOKEN", "two")
    write_tree(place.top / "told", {"tell.py": "import os; print('token', os.environ['TOKEN'])"})

    def step(name: str, place_of_it: str) -> pl.Step:
        token = {"TOKEN": pl.secret(place_of_it)}
        return pl.Step(name, pl.Estimator(place.top / "told", entry_script="tell.py", environment_variables=token))

    first, second = step("first", "env:FIRST_TOKEN"), step("second", "env:SECOND_TOKEN")
    run = submit(first, second.run_after(first))
    assert stat.S_IMODE(os.stat(run.folder.state).st_mode) == 0o600
    monkeypatch.delenv("SECOND_TOKEN")
    run.wait_for_completion()
    told = [(run.steps[name].folder.logs / "rank_0.log").read_text().strip() for name in ("first", "second")]
    assert told == ["token one", "token two"]
    assert not run.folder.secrets.exists()


def test_steps_with_data_at_a_fixed_place_run_again(place: Place, submit: Submit) -> None:
    def values(add: int) -> list[object]:
        clean = pl.PipelineData("clean", path="fixed/clean", overwrite=True)
        first = place.step("prepare", f"add={add}", ("out=", clean), outputs=[clean])
        second = place.step("train", ("in=", clean))
        run = submit(first, second)
        run.wait_for_completion()
        return [run.steps[name].get_metrics()["value"] for name in ("prepare", "train")]

    # The third run's first step equals that of the first run, but the second run has overwritten the files.
    assert [values(add) for add in (1, 2, 1)] == [[2, 3], [3, 4], [2, 3]]


def test_step_runs_again_after_the_files_of_a_registered_dataset_changed(place: Place, submit: Submit) -> None:
    store = pl.Datastore.get(place.workspace, "default")
    for number in (1, 5):
        folder = write_tree(place.top / f"given{number}", {"value.txt": str(number)})
        store.upload(folder, "registered", overwrite=True)
        if number == 1:
            pl.Dataset.File.from_files((store, "registered")).register(place.workspace, "numbers")
        given = pl.Dataset.get_by_name(place.workspace, "numbers").as_named_input("numbers").as_mount()
        run = submit(place.step("train", ("in=", given)))
        run.wait_for_completion()
        assert run.steps["train"].get_metrics() == {"value": number + 1}


def test_reused_step_has_the_uploaded_files_of_the_earlier_run(place: Place, submit: Submit) -> None:
    script = (
        "import paceline\nopen('m.txt', 'w').write('1')\npaceline.Run.get_context().upload_file('a/m.txt', 'm.txt')\n"
    )
    (place.source / "upload.py").write_text(script)
    for is_reused in (False, True):
        run = submit(pl.Step("upload", pl.Estimator(place.source, entry_script="upload.py")))
        run.wait_for_completion()
        assert bool(run.step_rows()[0]["reused_from"]) == is_reused
        assert (run.steps["upload"].folder.artifacts / "a" / "m.txt").read_text() == "1"


def test_step_is_reused_although_its_notification_receivers_changed(tmp_path: Path) -> None:
    jobs = [make_job(), make_job(notify=["mail:a@b.c"]), make_job(notify=["mail:a@b.c"], notify_on=["failure"])]
    keys = {reuse.key_of(StepSpec(name="a", job=job), job, tmp_path) for job in jobs}
    assert len(keys) == 1
    assert (
        reuse.key_of(StepSpec(name="a", job=make_job(arguments=("1",))), make_job(arguments=("1",)), tmp_path)
        not in keys
    )
