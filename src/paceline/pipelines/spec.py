"""The frozen description of a pipeline, stored in its record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.job.job import Job
from paceline.system.serialization import known_fields, plain_fields

#: Maximum number of steps in a pipeline. Users need far fewer.
MOST_STEPS = 1000


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """One step of a pipeline.

    Attributes:
        job: The job that is submitted, unless the step reuses the outputs of a former run.
        after: Numbers of the steps that must be Completed first.
        takes: {name of an input: (number of the step that writes its data, name of the data among that step's outputs)}.
        source_directory, snapshot_id, git: The step's source.
        allow_reuse: Whether to reuse the outputs of a former run if nothing has changed.
        sweep: The sweep's spec, if the step is a sweep.
        warnings: Warnings that are stored in the record of the step's run when the run is created.
    """

    name: str
    job: Job
    after: tuple[int, ...] = ()
    takes: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    source_directory: str = "."
    snapshot_id: str | None = None
    git: Mapping[str, object] = field(default_factory=dict)
    allow_reuse: bool = True
    sweep: Mapping[str, object] | None = None
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        return plain_fields(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepSpec:
        values = known_fields(cls, data)
        values["job"] = Job.from_json(data["job"])
        values["after"] = tuple(data.get("after") or ())
        values["takes"] = {name: (int(place[0]), str(place[1])) for name, place in (data.get("takes") or {}).items()}
        values["warnings"] = tuple(data.get("warnings") or ())
        return cls(**values)


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """The description of a pipeline, whose steps are in topological order.

    Attributes:
        parameters: Values of the pipeline's parameters at submission.
        outputs: {name of a pipeline's output: (number of the step that writes it, its name among that step's outputs)}.
        continue_on_step_failure: Whether steps that do not need a failed step go on.
        regenerate_outputs: Whether every step runs, without reusing outputs of former runs.
    """

    steps: tuple[StepSpec, ...]
    parameters: Mapping[str, object] = field(default_factory=dict)
    outputs: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    continue_on_step_failure: bool = False
    regenerate_outputs: bool = False
    description: str | None = None

    def to_json(self) -> dict[str, object]:
        return plain_fields(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PipelineSpec:
        """Return the spec that `to_json` wrote, without fields of newer versions."""
        values = known_fields(cls, data)
        values["steps"] = tuple(StepSpec.from_json(step) for step in data["steps"])
        values["outputs"] = {name: (int(p[0]), str(p[1])) for name, p in (data.get("outputs") or {}).items()}
        return cls(**values)


def child_id(pipeline_id: str, number: int) -> str:
    """Return the run id of a step: `<pipeline>_<number from 0>`."""
    return f"{pipeline_id}_{number}"
