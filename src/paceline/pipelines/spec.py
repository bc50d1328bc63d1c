"""What a pipeline is, as frozen data that its record holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.job.job import Job
from paceline.system.serialization import known_fields, plain_fields

#: The most steps of one pipeline. A guess, far above what people draw.
MOST_STEPS = 1000


@dataclass(frozen=True, kw_only=True)
class StepSpec:
    """One step: a job, as it is submitted where no step before it is reused.

    after: numbers of the steps that have to be Completed before.
    takes: name of an input -> number of the step and name of the output that it is.
    snapshot_id, source_directory, git: of its source. allow_reuse: take the outputs of a former run where nothing has changed.
    sweep: of a step that is a sweep, what it tries. warnings: of its run, from the start.
    """

    name: str
    job: Job
    after: tuple[int, ...] = ()
    takes: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    source_directory: str = "."
    snapshot_id: str | None = None
    git: Mapping[str, Any] = field(default_factory=dict)
    allow_reuse: bool = True
    sweep: Mapping[str, Any] | None = None
    warnings: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
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
    """The steps, each after all that it needs.

    parameters: those that the pipeline was submitted with. outputs: name that the pipeline gives -> step and output.
    continue_on_step_failure: steps that do not need the failed one go on. regenerate_outputs: run each step, whatever is known.
    """

    steps: tuple[StepSpec, ...]
    parameters: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    continue_on_step_failure: bool = False
    regenerate_outputs: bool = False
    description: str | None = None

    def to_json(self) -> dict[str, Any]:
        return plain_fields(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PipelineSpec:
        """The spec that `to_json` wrote; fields of a newer version are left out."""
        values = known_fields(cls, data)
        values["steps"] = tuple(StepSpec.from_json(step) for step in data["steps"])
        values["outputs"] = {name: (int(p[0]), str(p[1])) for name, p in (data.get("outputs") or {}).items()}
        return cls(**values)


def child_id(pipeline_id: str, number: int) -> str:
    """The run id of a step: `<pipeline>_<number from 0>`."""
    return f"{pipeline_id}_{number}"
