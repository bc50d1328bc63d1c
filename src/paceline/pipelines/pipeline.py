"""The public description of a pipeline, and its submission."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from paceline.data.stores.record import default_name
from paceline.errors import JobError, PipelineError, UserError
from paceline.job.notify import check_no_conditions
from paceline.pipelines.data import PipelineData, check_parameters, defaults
from paceline.pipelines.plan import flat, ordered, spec_of
from paceline.pipelines.spec import PipelineSpec, StepSpec
from paceline.pipelines.step import Step
from paceline.runs import controllers, store
from paceline.runs.folder import RunFolder
from paceline.runs.ids import check_experiment_name, check_run_id, new_run_id
from paceline.runs.record import RunRecord, user_name, utc_now
from paceline.snapshot import Progress, Snapshot, git_state
from paceline.submit import SourceCopy, being_started, check, places_of, take_snapshot, unrecorded, values_of
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.start import check_points


class Pipeline:
    """Steps, ordered by the data that one writes and another reads.

    `Experiment.submit` starts the pipeline.

    Args:
        steps: `Step`s, or lists of them. Further steps whose data these steps read are included. Independent steps run at the
            same time.
        outputs: A dict of output names to `PipelineData`.
        continue_on_step_failure: After a failure, continue the steps that do not need the failed one. Else cancel all steps.
        description: Text for people.

    Raises:
        PipelineError: Two steps have the same name, steps form a cycle, or no step writes data that a step reads.

    Examples:
        >>> prepare = pl.Step("prepare", pl.Estimator(entry_script="train.py"))
        >>> train = pl.Step("train", pl.Estimator(entry_script="train.py"), after=[prepare])
        >>> run = pl.Experiment(pl.Workspace("my_runs"), "digits").submit(pl.Pipeline([prepare, train]))
        >>> run.wait_for_completion().status
        'Completed'
    """

    def __init__(
        self,
        steps: Step | Sequence[Step | Sequence[Step]],
        *,
        outputs: Mapping[str, PipelineData] | None = None,
        continue_on_step_failure: bool = False,
        description: str | None = None,
    ) -> None:
        listed = flat(steps if isinstance(steps, (list, tuple)) else [steps])
        for step in listed:
            if not isinstance(step, Step):
                raise PipelineError(f"{step!r} is not a step. Make one: paceline.Step(name, estimator).")
        self.steps: list[Step] = ordered(listed, Step.needs, lambda step: step.name)
        names = [step.name for step in self.steps]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise PipelineError(f"two steps are called {twice[0]!r}. Give each a name of its own.")
        self.outputs = dict(outputs or {})
        self.continue_on_step_failure = continue_on_step_failure
        self.description = description
        # Call `spec` for its checks, so that an error appears where the user has created the pipeline.
        self.spec("check_0_00000000", "default", self.parameters)

    def __repr__(self) -> str:
        return f"Pipeline({self.steps!r})"

    @property
    def parameters(self) -> dict[str, object]:
        """The default value of each `PipelineParameter` in the steps, by name."""
        return defaults(parameter for step in self.steps for parameter in step.parameters().items())

    def spec(
        self, run_id: str, default_store: str, parameters: Mapping[str, object], *, regenerate_outputs: bool = False
    ) -> tuple[PipelineSpec, list[Path]]:
        """Return the pipeline's spec, and the source directory of each step.

        Args:
            run_id: Id of the pipeline's run.
            default_store: Name of the workspace's default datastore.
            parameters: Values of the pipeline's parameters by name.
            regenerate_outputs: Run every step instead of reusing outputs of former runs.
        """
        return spec_of(
            self.steps,
            lambda step, child: step.planned(child, default_store, parameters),
            lambda step: step.after,
            run_id,
            self.outputs,
            parameters=dict(parameters),
            continue_on_step_failure=self.continue_on_step_failure,
            regenerate_outputs=regenerate_outputs,
            description=self.description,
        )

    def submit(
        self,
        workspace_dir: Path,
        experiment: str,
        *,
        pipeline_parameters: Mapping[str, object] | None = None,
        parameters_told: Mapping[str, object] | None = None,
        regenerate_outputs: bool = False,
        tags: Mapping[str, object] | None = None,
        progress: Progress | None = None,
        display_name: str | None = None,
        run_id: str | None = None,
        values: Mapping[str, str] | None = None,
        leave_out: Sequence[Path] = (),
    ) -> RunFolder:
        """Start the pipeline. `Experiment.submit` calls this.

        parameters_told: Values to record among the run's parameters. The steps already have these values.
        """
        run_id = new_run_id(experiment) if run_id is None else check_run_id(run_id)
        parameters = check_parameters(self.parameters, dict(pipeline_parameters or {}))
        parameters |= parameters_told or {}
        spec, directories = self.spec(
            run_id, default_name(workspace_dir), parameters, regenerate_outputs=regenerate_outputs
        )
        return submit_pipeline(
            spec,
            directories,
            workspace_dir,
            experiment,
            run_id=run_id,
            tags=tags,
            progress=progress,
            display_name=display_name,
            values=values,
            leave_out=leave_out,
        )


def submit_pipeline(
    spec: PipelineSpec,
    directories: Sequence[Path],
    workspace_dir: Path,
    experiment: str,
    *,
    run_id: str,
    tags: Mapping[str, object] | None = None,
    progress: Progress | None = None,
    display_name: str | None = None,
    values: Mapping[str, str] | None = None,
    leave_out: Sequence[Path] = (),
) -> RunFolder:
    """Start a pipeline and return its folder immediately.

    `directories`: Source directory of each step.
    `run_id`: The pipeline's run id, which paths in `spec` contain.
    `values`: Values of the steps' secrets by name. Other secrets are read from their sources.
    `leave_out`: Files that are not copied from the source directories.

    Raises:
        UserError: Checks before the start show that the pipeline would fail; the message names the step.
        TargetError: The controller could not be started.
    """
    check_experiment_name(experiment)
    checked, secrets = check_steps(spec.steps, directories, workspace_dir, values or {})
    spec = dataclasses.replace(spec, steps=tuple(checked))
    copies: dict[Path, Snapshot] = {}
    steps = []
    for step, directory in zip(spec.steps, directories, strict=True):
        with _in_step(step):
            # Copy each source directory only once for all its steps. But check the script of each step.
            taken = take_snapshot(
                step.job,
                SourceCopy(directory=directory.absolute()),
                workspace_dir,
                progress,
                leave_out,
                copies.get(directory.absolute()),
            )
        copies.setdefault(directory.absolute(), taken)
        steps.append(dataclasses.replace(step, snapshot_id=taken.id, git=git_state(directory)))
    spec = dataclasses.replace(spec, steps=tuple(steps))
    targets = {step.job.compute_target for step in steps}
    record = RunRecord(
        run_id=run_id,
        experiment=experiment,
        kind="pipeline",
        created_utc=utc_now(),
        submitted_by=user_name(),
        target=targets.pop() if len(targets) == 1 else None,
        source_directory=steps[0].source_directory,
        snapshot_id=steps[0].snapshot_id,
        git=steps[0].git,
        pipeline=spec.to_json(),
        owner=store.owner(),
    )
    # Lock the folder before it becomes visible, because readers regard a run without a lock as abandoned.
    lock_fd = store.create(workspace_dir / "runs", record, secrets)
    folder = RunFolder(workspace_dir / "runs" / run_id)
    first = copies[directories[0].absolute()]
    with being_started(folder, record, lock_fd, first, tags=tags, display_name=display_name):
        folder.sources.mkdir()
        for taken in {taken.id: taken for taken in copies.values()}.values():
            (folder.sources / taken.id).symlink_to(os.path.relpath(taken.path, folder.sources))
        controllers.start(folder, lock_fd)
    return folder


def check_steps(
    steps: Sequence[StepSpec], directories: Sequence[Path], workspace_dir: Path, values: Mapping[str, str]
) -> tuple[list[StepSpec], dict[str, str]]:
    """Check a pipeline's steps. Return them without secret values, and {secret's source: its value}."""
    secrets: dict[str, str] = {}
    checked = []
    for step, directory in zip(steps, directories, strict=True):
        job, own_values = unrecorded(step.job, values)
        checked.append(dataclasses.replace(step, job=job))
        for place, value in _checked(checked[-1], directory, workspace_dir, own_values).items():
            if secrets.setdefault(place, value) != value:
                raise JobError(
                    f"step {step.name!r} and another step have different secrets at {place!r}, which is one place. Put each "
                    "into a variable of its own and name it with paceline.secret(NAME)."
                )
    return checked, secrets


def _checked(step: StepSpec, directory: Path, workspace_dir: Path, given: Mapping[str, str]) -> dict[str, str]:
    with _in_step(step):
        secret_values = values_of(step.job, given)
        check(step.job, workspace_dir)
        check_no_conditions(step.job.notify_on, "pipeline")
        if step.sweep is not None:
            check_points(step.job, SweepSpec.from_json(step.sweep), directory)
    # Store each secret under its source, because a variable may have different values in different steps.
    places = places_of(step.job)
    return {places[name]: value for name, value in secret_values.items()}


@contextlib.contextmanager
def _in_step(step: StepSpec) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        error.args = (f"step {step.name!r}: {error}", *error.args[1:])
        raise
