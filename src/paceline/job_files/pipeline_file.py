"""Read pipeline files (`paceline pipeline run pipeline.yaml`)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.data.stores.record import default_name
from paceline.errors import PipelineError
from paceline.job.data_reference import PATH_VARIABLES
from paceline.job.job import Job
from paceline.job_files import job_file
from paceline.job_files.description import Asked, asked, combined
from paceline.pipelines.data import PipelineData, check_parameters
from paceline.pipelines.pipeline import Pipeline, check_steps
from paceline.pipelines.step import Step
from paceline.runs.folder import RunFolder
from paceline.submit import check_source
from paceline.system.names import did_you_mean

_TOP = ("steps", "parameters", "continue_on_step_failure", "description")
_STEP = ("takes", "leaves", "after", "allow_reuse")
_WORD = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_-]*)\}|([A-Za-z_][A-Za-z0-9_]*))")


@dataclass(frozen=True, kw_only=True)
class PipelineFile:
    """The content of a pipeline file.

    `values` maps names to the secrets that the steps' dotenv files contain. `leave_out` lists the files with secrets,
    which Paceline must not copy into snapshots.
    """

    pipeline: Pipeline
    parameters: Mapping[str, Any]
    jobs: tuple[Job, ...]
    experiment: str
    display_name: str | None = None
    tags: dict[str, Any] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    leave_out: tuple[Path, ...] = ()

    def check(self, workspace_dir: Path) -> None:
        """Raise UserError if checks show that a step would fail."""
        spec, directories = self.pipeline.spec("check_0_00000000", default_name(workspace_dir), self.parameters)
        check_steps(spec.steps, directories, workspace_dir, self.values)
        for step, directory in zip(spec.steps, directories, strict=True):
            check_source(step.job, directory, workspace_dir)

    def submit(self, workspace_dir: Path, *, run_id: str | None = None, regenerate_outputs: bool = False) -> RunFolder:
        """Submit the pipeline and return its folder."""
        return self.pipeline.submit(
            workspace_dir,
            self.experiment,
            parameters_told=self.parameters,
            regenerate_outputs=regenerate_outputs,
            tags=self.tags,
            display_name=self.display_name,
            run_id=run_id,
            values=self.values,
            leave_out=self.leave_out,
        )


def read(
    path: Path, given: Mapping[str, str], *, text: str | None = None, offered: Mapping[str, str] | None = None
) -> PipelineFile:
    """Return the pipeline in a file, or in `text` instead of the file.

    `given` replaces values of the file's parameters. `offered` does too, and may name parameters that the file lacks.
    """
    node = job_file.composed(path, text)
    steps = next((value for key, value in node.value if key.value == "steps"), None)
    if steps is None or isinstance(steps.value, str) or not all(isinstance(one, tuple) for one in steps.value):
        raise PipelineError(f"{str(path)!r} is not a pipeline. Write `steps:` and below it each step's name and job.")
    pairs = list(steps.value)
    node.value = [(key, value) for key, value in node.value if key.value != "steps"]
    top = job_file.of_node(path, node, _TOP)
    own = {key: top.pop(key) for key in _TOP if key in top}
    defaults = _mapping(path, "parameters", own.get("parameters"))
    further = {key: value for key, value in (offered or {}).items() if key in defaults}
    parameters = check_parameters(defaults, {**further, **given})
    experiment, tags, display_name = top.pop("experiment", None), top.pop("tags", {}), top.pop("display_name", None)
    names = [str(key.value) for key, _ in pairs]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise PipelineError(f"{str(path)!r}: two steps are called {twice[0]!r}. Give each a name of its own.")
    described = {}
    for key, value in pairs:
        if isinstance(value.value, str) or not all(isinstance(one, tuple) for one in value.value):
            raise PipelineError(f"{str(path)!r}: step {key.value!r} takes keys and values, as `entry_script: a.py`.")
        described[str(key.value)] = combined(top, job_file.of_node(path, value, _STEP))
    steps, jobs = _made(path, described, parameters)
    return PipelineFile(
        pipeline=Pipeline(
            steps,
            continue_on_step_failure=_flag(
                path, "continue_on_step_failure", own.get("continue_on_step_failure", False)
            ),
            description=own.get("description"),
        ),
        parameters=parameters,
        jobs=tuple(job.job for job in jobs),
        experiment=experiment or re.sub(r"[^A-Za-z0-9_-]", "_", path.stem),
        display_name=display_name,
        tags=tags,
        values={name: value for job in jobs for name, value in job.values.items()},
        leave_out=tuple(dict.fromkeys(file for job in jobs for file in job.leave_out)),
    )


def _made(
    path: Path, described: Mapping[str, dict[str, Any]], parameters: Mapping[str, Any]
) -> tuple[list[Step], list[Asked]]:
    steps: dict[str, Step] = {}
    jobs: list[Asked] = []
    data: dict[str, PipelineData] = {}
    after: dict[str, Sequence[str]] = {}
    left = {}
    for name, one in described.items():
        left[name] = {key: _data(key, place) for key, place in _leaves(path, name, one.pop("leaves", None))}
        for key, found in left[name].items():
            if key in data:
                raise PipelineError(f"{str(path)!r}: two steps leave {key!r}. Give each data of its own.")
            data[key] = found
    for name, one in described.items():
        taken = _names(path, name, "takes", one.pop("takes", None))
        if unknown := [key for key in taken if key not in data]:
            raise PipelineError(
                f"{str(path)!r}: step {name!r} takes {unknown[0]!r}, which no step leaves.{did_you_mean(unknown[0], data)} They "
                f"leave {', '.join(data) or 'nothing'}."
            )
        after[name] = _names(path, name, "after", one.pop("after", None))
        allow_reuse = _flag(path, f"step {name!r}: allow_reuse", one.pop("allow_reuse", True))
        one.setdefault("source_directory", str(path.parent))
        words = {**{key: str(value) for key, value in parameters.items()}}
        words |= {key: f"${PATH_VARIABLES[1]}{key}" for key in (*taken, *left[name])}
        one["arguments"] = [_filled(word, words) for word in one.get("arguments") or ()]
        wanted = asked(one)
        inputs = (*wanted.job.inputs, *(data[key].as_reference() for key in taken))
        steps[name] = Step(
            name,
            replace(wanted.job, inputs=inputs),
            outputs=list(left[name].values()),
            allow_reuse=allow_reuse,
            source_directory=wanted.directory,
        )
        jobs.append(wanted)
    for name, others in after.items():
        for other in others:
            if other not in steps:
                raise PipelineError(
                    f"{str(path)!r}: step {name!r} runs after {other!r}, but the file has no such step."
                    f"{did_you_mean(other, steps)}"
                )
            steps[name].run_after(steps[other])
    return list(steps.values()), jobs


def _filled(word: str, words: Mapping[str, str]) -> str:
    """Return a step's argument with each `$name` and `${name}` replaced by `words[name]`."""
    return _WORD.sub(lambda found: words.get(found[1] or found[2], found[0]), word)


def _data(name: str, place: Any) -> PipelineData:
    if place is None:
        return PipelineData(name)
    store, _, folder = str(place).partition(":")
    return PipelineData(name, store, path=folder) if folder else PipelineData(name, store)


def _leaves(path: Path, step: str, given: Any) -> list[tuple[str, Any]]:
    if isinstance(given, dict):
        return [(str(name), place) for name, place in given.items()]
    return [(name, None) for name in _names(path, step, "leaves", given)]


def _names(path: Path, step: str, key: str, given: Any) -> list[str]:
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
        raise PipelineError(f"{str(path)!r}: step {step!r}: {key} takes a list of names, such as [clean].")
    return given


def _mapping(path: Path, key: str, given: Any) -> dict[str, Any]:
    if given is not None and not isinstance(given, dict):
        raise PipelineError(f"{str(path)!r}: {key} takes names and values, a line each, such as `epochs: 3`.")
    return dict(given or {})


def _flag(path: Path, key: str, given: Any) -> bool:
    if not isinstance(given, bool):
        raise PipelineError(f"{str(path)!r}: {key}: {given!r} is neither true nor false.")
    return given
