"""pipeline run, show: run steps in the order in which they need each other's data."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline.children import child
from paceline.cli.common import key_value, print_fields, print_json, print_table, with_children
from paceline.cli.options import DETACH, JSON, VerbOption, takes
from paceline.cli.run_options import NAME
from paceline.cli.summary import print_submitted, summary
from paceline.errors import PipelineError
from paceline.job.data_reference import PATH_VARIABLES
from paceline.job_files import job_file
from paceline.job_files.description import Asked, asked, combined
from paceline.pipelines import pipeline_run
from paceline.pipelines.data import PipelineData, check_parameters
from paceline.pipelines.pipeline import Pipeline
from paceline.pipelines.spec import PipelineSpec
from paceline.pipelines.step import Step
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, duration_text
from paceline.runs.visible import visible, visible_line
from paceline.system.names import did_you_mean
from paceline.workspace import Workspace

if TYPE_CHECKING:
    from paceline.cli.outputs import PipelineDetails

RUN_PIPELINE = (
    VerbOption("file", "The pipeline's file (.yaml).", "FILE", Path, needed=True),
    VerbOption("--param", "Value of a parameter, which replaces the file's; may be repeated.", "NAME=VALUE", list),
    VerbOption("-e --experiment", "Experiment; default: the file's, or its name.", "NAME", complete="experiments"),
    NAME,
    VerbOption("--tag", "Set a tag; may be repeated.", "KEY[=VALUE]", list),
    VerbOption("--regenerate", "Run each step, without reusing results of former runs.", type=bool),
    DETACH,
    VerbOption("--dry-run", "Print the steps in their order and start nothing.", type=bool),
    JSON,
    VerbOption("-q --quiet", "Print only errors, and with --json the JSON.", type=bool),
)

ANY_PIPELINE = VerbOption("run_id", "Pipeline: its id, the beginning of it, or its name; default: the latest.", "[RUN]")
FOLLOW = VerbOption("-f --follow", "Follow the pipeline until it ends.", type=bool)


_TOP = ("steps", "parameters", "continue_on_step_failure", "description")
_STEP = ("takes", "leaves", "after", "allow_reuse")
_WORD = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_-]*)\}|([A-Za-z_][A-Za-z0-9_]*))")


@takes(*RUN_PIPELINE)
def run(**given: Any) -> int:
    """Run the steps of a file, each as its own run. Follows the pipeline to its end.

    Ctrl-C only stops following; the pipeline goes on. `paceline cancel` ends it with all its steps.
    """
    file = read(given["file"], dict(_pair(word) for word in given["param"] or ()))
    pipeline = file.pipeline
    if given["dry_run"]:
        return _print_plan(pipeline.spec("dry_0_00000000", "default", {})[0], as_json=given["as_json"])
    tags = {key: value or None for key, _, value in (word.partition("=") for word in given["tag"] or ())}
    folder = pipeline.submit(
        Workspace.from_config().path,
        given["experiment"] or file.experiment,
        parameters_told=file.parameters,
        regenerate_outputs=given["regenerate"],
        tags={**file.tags, **tags},
        display_name=given["name"] or file.display_name,
        values=file.values,
        leave_out=file.leave_out,
    )
    if given["detach"]:
        hints = f"See it:      paceline pipeline show {folder.run_id}\nEnd it:      paceline cancel {folder.run_id}"
        return print_submitted(folder, hints, as_json=given["as_json"])
    return _follow(folder, as_json=given["as_json"], quiet=given["quiet"])


@takes(ANY_PIPELINE, FOLLOW, JSON)
def show(*, run_id: str | None, follow: bool, as_json: bool) -> int:
    """Show a pipeline's steps in their order."""
    folder, record = with_children(run_id, "pipeline")
    if follow and not record.is_terminal:
        return _follow(folder, as_json=as_json, quiet=False)
    if as_json:
        print_json(_json(folder, record))
        return 0
    parameters = PipelineSpec.from_json(record.pipeline or {}).parameters
    print_fields(
        [
            ("Pipeline", record.run_id),
            ("Status", record.status),
            ("Parameters", ", ".join(f"{key}={value}" for key, value in parameters.items())),
            ("Waits for", record.waiting_for or ""),
            ("Why", record.failure.message if record.failure else ""),
        ]
    )
    print()
    print_steps(folder, record)
    return 0


def print_steps(folder: RunFolder, record: RunRecord) -> None:
    """Print the table of a pipeline's steps."""
    rows = [
        (
            visible(row["step"]),
            row["status"],
            f"reused from {row['reused_from']}" if row["reused_from"] else row["run_id"] or "-",
            duration_text(row["duration_s"]) if row["duration_s"] is not None and not row["reused_from"] else "-",
            visible(", ".join(row["after"])) or "-",
        )
        for row in pipeline_run.rows(folder, record)
    ]
    print_table(("STEP", "STATUS", "RUN", "TOOK", "AFTER"), rows)


def _print_plan(spec: PipelineSpec, *, as_json: bool) -> int:
    if as_json:
        steps = [{**step.to_json(), "job": step.job.shown()} for step in spec.steps]
        print_json({**spec.to_json(), "steps": steps})
        return 0
    rows = []
    for step in spec.steps:
        command = " ".join([*step.job.entry_words, *step.job.arguments])
        after = ", ".join(spec.steps[other].name for other in step.after) or "-"
        rows.append((visible(step.name), step.job.compute_target, visible(after), visible(command)))
    print_table(("STEP", "TARGET", "AFTER", "COMMAND"), rows)
    return 0


def _follow(folder: RunFolder, *, as_json: bool, quiet: bool) -> int:
    def line(text: str) -> None:
        if not quiet:
            print(visible_line(text), file=sys.stderr, flush=True)

    line(f"Pipeline {folder.run_id}")
    try:
        record = child.follow_log(folder, line)
    except KeyboardInterrupt:
        line(f"\nThe pipeline goes on: paceline pipeline show -f {folder.run_id}")
        raise
    if as_json:
        print_json(_json(folder, record))
    elif not quiet:
        print_steps(folder, record)
    if record.failure is not None:
        print(visible(str(record.failure), lines=True), file=sys.stderr)
    return record.exit_code if record.exit_code is not None else 1


def _json(folder: RunFolder, record: RunRecord) -> PipelineDetails:
    told = record.pipeline or {}
    return {
        **summary(folder, record),
        "parameters": cast("dict[str, object]", told.get("parameters") or {}),
        "description": cast("str | None", told.get("description")),
        "steps": pipeline_run.rows(folder, record),
    }


def _pair(word: str) -> tuple[str, str]:
    return key_value(word, PipelineError(f"--param {word!r} is not NAME=VALUE, such as --param epochs=5."))


@dataclass(frozen=True, kw_only=True)
class PipelineFile:
    """The content of a pipeline file.

    `values` maps names to the secrets that the steps' dotenv files contain. `leave_out` lists the files with secrets,
    which Paceline must not copy into snapshots.
    """

    pipeline: Pipeline
    parameters: Mapping[str, Any]
    experiment: str
    display_name: str | None = None
    tags: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    leave_out: tuple[Path, ...] = ()


def read(path: Path, given: Mapping[str, str]) -> PipelineFile:
    """Return the pipeline in a file. `given` parameters replace the file's values."""
    node = job_file.composed(path)
    steps = next((value for key, value in node.value if key.value == "steps"), None)
    if steps is None or isinstance(steps.value, str) or not all(isinstance(one, tuple) for one in steps.value):
        raise PipelineError(f"{str(path)!r} is not a pipeline. Write `steps:` and below it each step's name and job.")
    pairs = list(steps.value)
    node.value = [(key, value) for key, value in node.value if key.value != "steps"]
    top = job_file.of_node(path, node, _TOP)
    own = {key: top.pop(key) for key in _TOP if key in top}
    parameters = check_parameters(_mapping(path, "parameters", own.get("parameters")), dict(given))
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
    """Return a step's argument with parameters and data paths filled in."""
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


verbs = {"run": run, "show": show}
