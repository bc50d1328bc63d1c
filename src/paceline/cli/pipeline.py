"""pipeline run, show: steps that run in the order of their data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import pipeline_file
from paceline.cli.common import print_fields, print_json, print_table, with_children
from paceline.cli.options import DETACH, JSON, VerbOption, takes
from paceline.cli.run_options import NAME
from paceline.cli.shared_options import Json
from paceline.cli.summary import print_submitted, summary
from paceline.controlling import following
from paceline.errors import PipelineError
from paceline.pipelines import results
from paceline.pipelines.spec import PipelineSpec
from paceline.runs.folder import RunFolder
from paceline.runs.follow import duration_text
from paceline.runs.record import RunRecord
from paceline.runs.visible import visible, visible_line
from paceline.workspace import Workspace

RUN_PIPELINE = (
    VerbOption("file", "The pipeline's file (.yaml).", "FILE", Path, needed=True),
    VerbOption("--param", "Value of a parameter, in place of the file's; may be repeated.", "NAME=VALUE", list),
    VerbOption("-e --experiment", "Default: the file's, or its name.", "NAME", complete="experiments"),
    NAME,
    VerbOption("--tag", "Set a tag; may be repeated.", "KEY[=VALUE]", list),
    VerbOption("--regenerate", "Run each step, whatever former runs have left.", type=bool),
    DETACH,
    VerbOption("--dry-run", "Print the steps in their order; start nothing.", type=bool),
    JSON,
    VerbOption("-q --quiet", "Only errors, and with --json the JSON.", type=bool),
)

AnyPipeline = Annotated[
    str | None,
    typer.Argument(metavar="[RUN]", help="Pipeline: its id, the beginning of it, or its name; default: the latest."),
]
Follow = Annotated[bool, typer.Option("-f", "--follow", help="Until the pipeline has ended.")]

verbs = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@verbs.command("run")
@takes(*RUN_PIPELINE)
def run(**given: Any) -> int:
    """Run the steps that a file describes, each as a run of its own, and follow the pipeline to its end.

    Ctrl-C only stops the following; the pipeline goes on. `paceline cancel` ends it with all its steps.
    """
    file = pipeline_file.read(given["file"], dict(_pair(word) for word in given["param"] or ()))
    pipeline = file.pipeline
    if given["dry_run"]:
        return _print_plan(pipeline.spec("dry_0_00000000", "default", {})[0], as_json=given["json"])
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
        return print_submitted(folder, hints, as_json=given["json"])
    return _follow(folder, as_json=given["json"], quiet=given["quiet"])


@verbs.command("show")
def show(run_id: AnyPipeline = None, follow: Follow = False, as_json: Json = False) -> int:
    """How a pipeline stands: its steps in their order."""
    folder, record = with_children(run_id, "pipeline")
    if follow and not record.is_terminal:
        return _follow(folder, as_json=as_json, quiet=False)
    if as_json:
        print_json(_json(folder, record))
        return 0
    parameters = (record.pipeline or {})["parameters"]
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
    """The table of a pipeline's steps."""
    rows = [
        (
            visible(row["step"]),
            row["status"],
            f"reused from {row['reused_from']}" if row["reused_from"] else row["run_id"] or "-",
            duration_text(row["duration_s"]) if row["duration_s"] is not None and not row["reused_from"] else "-",
            visible(", ".join(row["after"])) or "-",
        )
        for row in results.rows(folder, record)
    ]
    print_table(("STEP", "STATUS", "RUN", "TOOK", "AFTER"), rows, status_column=1)


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
        record = following.to_the_end(folder, line)
    except KeyboardInterrupt:
        line(f"\nThe pipeline goes on: paceline pipeline show -f {folder.run_id}")
        return 0
    if as_json:
        print_json(_json(folder, record))
    elif not quiet:
        print_steps(folder, record)
    if record.failure is not None:
        print(visible(str(record.failure), lines=True), file=sys.stderr)
    return record.exit_code if record.exit_code is not None else 1


def _json(folder: RunFolder, record: RunRecord) -> dict[str, Any]:
    told = record.pipeline or {}
    return {
        **summary(folder, record),
        "parameters": told.get("parameters") or {},
        "description": told.get("description"),
        "steps": results.rows(folder, record),
    }


def _pair(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals or not name:
        raise PipelineError(f"--param {word!r} is not NAME=VALUE, such as --param epochs=5.")
    return name, value
