"""pipeline run, show: run steps in the order in which they need each other's data."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from paceline.children import child
from paceline.cli.common import key_value, print_fields, print_json, print_table, with_children
from paceline.cli.options import DETACH, JSON, VerbOption, takes
from paceline.cli.run_options import NAME
from paceline.cli.summary import print_submitted, summary
from paceline.errors import PipelineError
from paceline.job_files.pipeline_file import read
from paceline.pipelines import pipeline_run
from paceline.pipelines.spec import PipelineSpec
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, duration_text
from paceline.runs.visible import visible, visible_line
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


@takes(*RUN_PIPELINE)
def run(**given: Any) -> int:
    """Run the steps of a file, each as its own run.

    Follows the pipeline to its end. Ctrl-C only stops following. `paceline cancel` ends the pipeline with all its steps.
    """
    file = read(given["file"], dict(_pair(word) for word in given["param"] or ()))
    pipeline = file.pipeline
    if given["dry_run"]:
        return _print_plan(pipeline.spec("dry_0_00000000", "default", {})[0], as_json=given["as_json"])
    tags = {key: value or None for key, _, value in (word.partition("=") for word in given["tag"] or ())}
    file = replace(
        file,
        experiment=given["experiment"] or file.experiment,
        tags={**file.tags, **tags},
        display_name=given["name"] or file.display_name,
    )
    folder = file.submit(Workspace.from_config().path, regenerate_outputs=given["regenerate"])
    if given["detach"]:
        hints = f"See it:      paceline pipeline show {folder.run_id}\nEnd it:      paceline cancel {folder.run_id}"
        return print_submitted(folder, hints, as_json=given["as_json"], quiet=given["quiet"])
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
        print_json({**spec.to_json(), "steps": [{**step.to_json(), "job": step.job.shown()} for step in spec.steps]})
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


verbs = {"run": run, "show": show}
