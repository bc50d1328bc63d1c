"""The public description of a pipeline's step."""

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
#: Fields of an estimator that may contain parameters of the pipeline.
_WITH_PARAMETERS = ("script_params", "arguments", "command")


class Step:
    """One step of a pipeline.

    A step begins when the steps whose data it reads, and the steps of `after` and `run_after`, are Completed.

    Args:
        name: Unique within the pipeline.
        config: An estimator, a `Sweep`, or a `Job`.
        outputs: The `PipelineData` that the step writes. All other data in its arguments and inputs are read.
        after: Steps that must be Completed first, although this step does not read their data.
        allow_reuse: Reuse the outputs of a former run with the same source, job, environment and inputs. A sweep always runs.
        source_directory: Source directory of a `Job`.

    Raises:
        PipelineError: A value is wrong.

    Examples:
        >>> prepare = pl.Step("prepare", pl.Estimator(entry_script="train.py"))
        >>> train = pl.Step("train", pl.Estimator(entry_script="train.py"), after=[prepare])
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
                f"step {name!r}: give source_directory with a Job, and leave it out with an estimator, which has its own."
            )
        if not (is_estimator(config) or isinstance(config, (Sweep, Job))):
            raise PipelineError(
                f"step {name!r} is a {type(config).__name__}. Give an Estimator, PyTorch, TensorFlow, SKLearn, Sweep or Job."
            )
        if isinstance(outputs, PipelineData) or not all(isinstance(data, PipelineData) for data in outputs):
            raise PipelineError(f"outputs={outputs!r} of step {name!r} is not a list of PipelineData.")
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
            # A notebook cell may run twice and create this step twice. The last step with this output counts as its producer.
            data.producer = self

    def __repr__(self) -> str:
        return f"Step({self.name!r})"

    def run_after(self, *steps: Step) -> Step:
        """Let this step begin only when other steps are Completed. Return this step.

        Args:
            steps: Steps that this one waits for.
        """
        for step in steps:
            if not isinstance(step, Step):
                raise PipelineError(f"step {self.name!r} can't run after {step!r}, which is not a step.")
            self._after.append(step)
        return self

    @property
    def after(self) -> tuple[Step, ...]:
        """The steps of `after` and `run_after`, without steps whose data this step reads."""
        return tuple(self._after)

    def needs(self) -> list[Step]:
        """Return all steps that must be Completed before this step.

        Raises:
            PipelineError: No step writes data that this step reads.
        """
        needed = list(self._after)
        for reference in self._job({}).inputs:
            if isinstance(reference, PendingReference) and reference.data not in self.outputs:
                producer = reference.data.producer
                if producer is None:
                    raise PipelineError(
                        f"step {self.name!r} takes {reference.name!r}, which no step leaves. Name it among a step's outputs."
                    )
                needed.append(producer)
        return needed

    def parameters(self) -> dict[str, object]:
        """Return the default values of the step's parameters, by name.

        Raises:
            PipelineError: Two parameters with the same name have different defaults.
        """
        words = (word for name in _WITH_PARAMETERS for word in _words(getattr(self._estimator, name, None)))
        return defaults((word.name, word.default_value) for word in words if isinstance(word, PipelineParameter))

    def planned(self, run_id: str, default_store: str, parameters: Mapping[str, object]) -> Planned:
        """Return the step's job and outputs, with paths for the run `run_id`.

        Args:
            run_id: Id of the step's run.
            default_store: Name of the workspace's default datastore.
            parameters: Values of the pipeline's parameters by name.

        Raises:
            JobError: The value of a parameter cannot be passed to a script.
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

    def _job(self, parameters: Mapping[str, object]) -> Job:
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


def _filled(value: Any, parameters: Mapping[str, object]) -> object:
    if not any(isinstance(word, PipelineParameter) for word in _words(value)):
        return value

    def one(word: object) -> object:
        return parameters.get(word.name, word.default_value) if isinstance(word, PipelineParameter) else word

    if isinstance(value, Mapping):
        return {name: one(word) for name, word in value.items()}
    return [one(word) for word in value]
