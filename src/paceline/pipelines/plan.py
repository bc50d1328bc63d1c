"""Convert a pipeline's steps to a spec, in which all data have a location."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import PipelineError
from paceline.job.data_reference import DataReference
from paceline.job.job import Job
from paceline.pipelines.data import PendingReference
from paceline.pipelines.spec import MOST_STEPS, PipelineSpec, StepSpec, child_id

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A pipeline's step whose run id is known.

    Attributes:
        job: The step's job. An input that another step writes is a `PendingReference`.
        directory: The source directory.
        gives: Pairs of a `PipelineData` that the step writes and this output's name in the job.
    """

    name: str
    job: Job
    directory: Path
    gives: Sequence[tuple[object, str]] = ()
    allow_reuse: bool = True
    sweep: Mapping[str, object] | None = None
    warnings: tuple[str, ...] = ()


def spec_of(
    steps: Sequence[T],
    plan: Callable[[T, str], Planned],
    after: Callable[[T], Sequence[T]],
    pipeline_id: str,
    outputs: Mapping[str, object] | None = None,
    **values: Any,
) -> tuple[PipelineSpec, list[Path]]:
    """Return the spec of a pipeline, and the source directory of each step.

    `steps`: The steps in an order in which they can run.
    `plan`: Called with a step and its run id; returns the step as `Planned`.
    `after`: Returns the steps that must be Completed before a step, besides steps whose data it reads.
    `outputs`: The pipeline's outputs as a dict of names to data objects.
    `values`: Other fields of `PipelineSpec`.

    Raises:
        PipelineError: There are no steps or too many, two steps write the same data, or no step writes data that is needed.
    """
    if not steps:
        raise PipelineError("a pipeline without steps has nothing to do. Give it at least one.")
    if len(steps) > MOST_STEPS:
        raise PipelineError(f"{len(steps)} steps: a pipeline has {MOST_STEPS} at most.")
    numbers = {id(step): number for number, step in enumerate(steps)}
    known: dict[int, tuple[int, str]] = {}
    made: list[StepSpec] = []
    directories = []
    for number, step in enumerate(steps):
        planned = plan(step, child_id(pipeline_id, number))
        inputs, takes = _inputs(planned, known, made)
        for data, name in planned.gives:
            if id(data) in known:
                other = made[known[id(data)][0]].name
                raise PipelineError(
                    f"steps {other!r} and {planned.name!r} both leave {name!r}. Give each its own name."
                )
            known[id(data)] = number, name
        before = {numbers[id(other)] for other in after(step)} | {source for source, _ in takes.values()}
        made.append(
            StepSpec(
                name=planned.name,
                job=dataclasses.replace(planned.job, inputs=inputs),
                after=tuple(sorted(before)),
                takes=takes,
                source_directory=str(planned.directory.absolute()),
                allow_reuse=planned.allow_reuse,
                sweep=planned.sweep,
                warnings=planned.warnings,
            )
        )
        directories.append(planned.directory)
    places = {}
    for name, data in (outputs or {}).items():
        if id(data) not in known:
            raise PipelineError(f"no step of the pipeline leaves its output {name!r}.")
        places[name] = known[id(data)]
    return PipelineSpec(steps=tuple(made), outputs=places, **values), directories


def step_output(job: Job, name: str) -> DataReference:
    """Return the output `name` of a step's job."""
    return next(reference for reference in job.inputs if reference.name == name and reference.is_output)


def _inputs(
    planned: Planned, known: Mapping[int, tuple[int, str]], made: Sequence[StepSpec]
) -> tuple[tuple[DataReference, ...], dict[str, tuple[int, str]]]:
    inputs: list[DataReference] = []
    takes: dict[str, tuple[int, str]] = {}
    for reference in planned.job.inputs:
        if not isinstance(reference, PendingReference):
            inputs.append(reference)
            continue
        if id(reference.data) not in known:
            raise PipelineError(
                f"step {planned.name!r} takes {reference.name!r}, which no step leaves. Name it among a step's outputs."
            )
        number, name = known[id(reference.data)]
        takes[reference.name] = number, name
        values = {f.name: getattr(reference, f.name) for f in dataclasses.fields(DataReference)}
        left = step_output(made[number].job, name)
        inputs.append(DataReference(**{**values, "sources": left.sources, "inside": left.inside}))
    return tuple(inputs), takes


def flat(steps: Iterable[Any]) -> list[Any]:
    """Return the steps in nested lists as one list."""
    flattened: list[Any] = []
    for step in steps:
        flattened += flat(step) if isinstance(step, (list, tuple)) else [step]
    return flattened


def ordered(steps: Sequence[T], needs: Callable[[T], Iterable[T]], name: Callable[[T], str]) -> list[T]:
    """Return the steps in topological order, each after the steps that it needs.

    `name`: Returns a step's name for messages.

    Raises:
        PipelineError: The steps form a cycle.
    """
    done: dict[int, T] = {}
    for step in steps:
        _walk(step, needs, name, done, [])
    return list(done.values())


def _walk(
    step: T, needs: Callable[[T], Iterable[T]], name: Callable[[T], str], done: dict[int, T], above: list[T]
) -> None:
    if id(step) in done:
        return
    for number, other in enumerate(above):
        if other is step:
            names = " -> ".join(name(walked) for walked in (*above[number:], step))
            raise PipelineError(f"the steps need each other in a circle: {names}. Take one of these arrows out.")
    for needed in needs(step):
        _walk(needed, needs, name, done, [*above, step])
    done[id(step)] = step
