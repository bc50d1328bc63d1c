"""A step of a pipeline, as its user writes it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import PipelineError
from paceline.estimator import is_estimator
from paceline.job.job import Job
from paceline.pipelines.data import PendingReference, PipelineData, PipelineParameter, defaults
from paceline.pipelines.plan import Planned
from paceline.sweeps.sweep import Sweep

if TYPE_CHECKING:
    from paceline.estimator import _Script as Script

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_. -]{0,99}")
#: Where a parameter may stand in an estimator.
_WITH_PARAMETERS = ("script_params", "arguments", "command")


class Step:
    """One step: what it runs, and what it leaves. It begins when all steps whose data it takes are Completed, and those of
    `run_after`.

    name: its own within the pipeline. config: an estimator; a `Sweep`; or a `Job`, with its source_directory.
    outputs: the `PipelineData` that it leaves; any other in its arguments and inputs is what it takes.
    after: steps that have to be Completed before, whose data it does not take.
    allow_reuse: where its source, job, environment and inputs are those of a former run, take what that has left and start
        nothing. A sweep always runs.

    Raises:
        PipelineError: a value is wrong.
    """

    def __init__(
        self,
        name: str,
        config: Script | Sweep | Job,
        *,
        outputs: Sequence[PipelineData] = (),
        after: Sequence[Step] = (),
        allow_reuse: bool = True,
        source_directory: str | Path | None = None,
    ) -> None:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise PipelineError(f"step name {name!r}: letters, digits, blanks, '_', '-' and '.', at most 100.")
        if isinstance(config, Job) == (source_directory is None):
            raise PipelineError(
                f"step {name!r}: source_directory belongs to a Job, and a Job needs one. An estimator has its own."
            )
        if not (is_estimator(config) or isinstance(config, (Sweep, Job))):
            raise PipelineError(
                f"step {name!r} is a {type(config).__name__}. Give an Estimator, PyTorch, TensorFlow, SKLearn, Sweep or Job."
            )
        if isinstance(outputs, PipelineData) or not all(isinstance(data, PipelineData) for data in outputs):
            raise PipelineError(f"outputs={outputs!r} of step {name!r} is no list of PipelineData.")
        if outputs and isinstance(config, Sweep):
            raise PipelineError(
                f"step {name!r} is a sweep, whose trials would all leave the same output. Let a step after it take the best."
            )
        self.name = name
        self.config = config
        self.outputs = tuple(outputs)
        self.allow_reuse = allow_reuse
        self._directory = source_directory
        self._after: list[Step] = []
        self.run_after(*after)
        for data in self.outputs:
            # The last step that was made with it: in a notebook a cell is run again.
            data.producer = self

    def __repr__(self) -> str:
        return f"Step({self.name!r})"

    def run_after(self, *steps: Step) -> Step:
        """Begin only when these are Completed; the step itself.

        Args:
            steps: Steps that this one waits for.
        """
        for step in steps:
            if not isinstance(step, Step):
                raise PipelineError(f"step {self.name!r} can't run after {step!r}, which is no step.")
            self._after.append(step)
        return self

    @property
    def after(self) -> tuple[Step, ...]:
        """The steps that were named to be Completed before this one begins; those whose data it takes are not among them."""
        return tuple(self._after)

    def needs(self) -> list[Step]:
        """The steps that have to be Completed before.

        Raises:
            PipelineError: it takes data that no step leaves.
        """
        found = list(self._after)
        for reference in self._job({}).inputs:
            if isinstance(reference, PendingReference) and reference.data not in self.outputs:
                producer = reference.data.producer
                if producer is None:
                    raise PipelineError(
                        f"step {self.name!r} takes {reference.name!r}, which no step leaves. Name it among the outputs of one."
                    )
                found.append(producer)
        return found

    def parameters(self) -> dict[str, Any]:
        """Name -> default of each parameter that stands in it.

        Raises:
            PipelineError: two of one name have different defaults.
        """
        words = (word for name in _WITH_PARAMETERS for word in _words(getattr(self._estimator, name, None)))
        return defaults((word.name, word.default_value) for word in words if isinstance(word, PipelineParameter))

    def planned(self, run_id: str, default_store: str, parameters: Mapping[str, Any]) -> Planned:
        """The step for its run.

        Raises:
            JobError: a parameter's value is none that a script could get.
        """
        job = self._job(parameters)
        inputs = [
            reference
            for reference in job.inputs
            if not (isinstance(reference, PendingReference) and reference.data in self.outputs)
        ]
        inputs += [data.destination(run_id, default_store) for data in self.outputs]
        return Planned(
            name=self.name,
            job=dataclasses.replace(job, inputs=tuple(inputs)),
            directory=Path(self._directory or self._estimator.source_directory),
            gives=[(data, data.name) for data in self.outputs],
            allow_reuse=self.allow_reuse,
            sweep=self.config.spec().to_json() if isinstance(self.config, Sweep) else None,
        )

    @property
    def _estimator(self) -> Any:
        return self.config.estimator if isinstance(self.config, Sweep) else self.config

    def _job(self, parameters: Mapping[str, Any]) -> Job:
        estimator = self._estimator
        if isinstance(estimator, Job):
            return estimator
        filled = {name: _filled(getattr(estimator, name), parameters) for name in _WITH_PARAMETERS}
        changed = {name: value for name, value in filled.items() if value is not getattr(estimator, name)}
        made: Job = (dataclasses.replace(estimator, **changed) if changed else estimator).job()
        return made


def _words(value: Any) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, Sequence) and not isinstance(value, str) else ()


def _filled(value: Any, parameters: Mapping[str, Any]) -> Any:
    """The same with the values of parameters in their places; the same object where there is none."""
    if not any(isinstance(word, PipelineParameter) for word in _words(value)):
        return value

    def one(word: Any) -> Any:
        return parameters.get(word.name, word.default_value) if isinstance(word, PipelineParameter) else word

    if isinstance(value, Mapping):
        return {name: one(word) for name, word in value.items()}
    return [one(word) for word in value]
