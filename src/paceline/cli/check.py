"""check: compare a script's first steps on one process with those on several."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from paceline.cli.common import print_json
from paceline.cli.options import JSON, Given, VerbOption, takes
from paceline.cli.run_options import RUN, words
from paceline.cli.view import RunView
from paceline.errors import JobError
from paceline.job_files.description import Asked, asked
from paceline.runs import read, states
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, user_name
from paceline.runs.visible import visible
from paceline.system.files import read_json
from paceline.system.units import size_text
from paceline.workspace import Workspace

if TYPE_CHECKING:
    from paceline.cli.outputs import StepComparison

STEPS, MOST_STEPS = 3, 1000
#: Copies of constants in `paceline.parallel.compared`, because importing that module would load torch.
VARIABLE, FOLDER, VALUES, OUTCOME = "PACELINE_CHECK", "check", "values.pt", "outcome.json"

_TAKEN = ("script", "arguments", "module", "nodes", "backend", "source", "env", "env_file", "python", "isolated")
CHECK = (
    *(option for option in RUN if option.name in _TAKEN),
    VerbOption("--steps", "Steps to compare; default: 3.", "N", int),
    JSON,
)


@takes(*CHECK)
def check(**given: Any) -> int:
    """Compare a script's first steps on one process and on several.

    The script calls paceline.parallelize. It runs twice on this machine, by default for three steps. Losses and
    parameters must be equal, otherwise the exit code is 1. Both runs start with equal values, and get equal random numbers from
    torch (dropout). Both use float64, because rounding could hide errors, or the script's dtype if float64 does not work.
    """
    steps = STEPS if given["steps"] is None else given["steps"]
    if not 1 <= steps <= MOST_STEPS:
        raise JobError(f"--steps {steps}: a number from 1 to {MOST_STEPS}.")
    many = _wanted(given)
    # Compare an elastic job at its largest size.
    many = dataclasses.replace(many, job=dataclasses.replace(many.job, node_range=None))
    one = dataclasses.replace(
        many, job=dataclasses.replace(many.job, node_count=1, process_count_per_node=1, distributed_backend=None)
    )
    view = RunView(1, quiet=given["as_json"])
    made: list[RunFolder] = []
    try:
        return _compared(one, many, steps, view, made, as_json=given["as_json"])
    finally:
        # Remove the recorded tensors, which take twice the model's size. Keep the results of the comparison.
        for folder in made:
            shutil.rmtree(folder.outputs / FOLDER, ignore_errors=True)


def _wanted(given: Given) -> Asked:
    file, description = words({option.name: option.default for option in RUN} | dict(given))
    if file is not None:
        from paceline.job_files import job_file

        description = job_file.under(file, description)
    if "compute_target" in description and description["compute_target"] != "local":
        raise JobError(
            f"{file} runs on {description['compute_target']!r}; `paceline check` compares on this machine. Leave compute_target "
            "out."
        )
    if "process_count_per_node" not in description and "worker_count" not in description:
        description["process_count_per_node"] = 2
    description.setdefault("distributed_backend", "gloo")
    wanted = asked(description)
    if wanted.job.world_size < 2:
        raise JobError("-j 1: one process is what the others are compared with. Give two or more, such as -j 2.")
    return wanted


def _compared(one: Asked, many: Asked, steps: int, view: RunView, made: list[RunFolder], *, as_json: bool) -> int:
    name = " ".join(many.job.entry_words)
    count = many.job.world_size
    for precision in ("float64", "own"):
        alone = _run(one, {"steps": steps, "precision": precision}, made)
        view.say(f"Run {alone.run_id}: {name} in one process" + ("" if precision == "float64" else ", in its own type"))
        record = _end(alone)
        outcome = _outcome(alone)
        if record.status == states.COMPLETED:
            break
    problem = _problem(record, outcome, steps, "in one process", name)
    found: StepComparison = {}
    runs = [alone.run_id]
    if not problem:
        request = {"steps": steps, "precision": precision, "against": str(alone.outputs / FOLDER)}
        together = _run(many, request, made)
        runs.append(together.run_id)
        view.say(f"Run {together.run_id}: the same on {count} workers")
        record = _end(together)
        found = _outcome(together)
        problem = _problem(record, found, steps, f"on {count} workers", name)
    found["equal"] = bool(found.get("equal")) and not problem
    found["runs"], found["workers"] = runs, count
    if problem:
        found["problem"] = problem
    if as_json:
        print_json(found)
    else:
        print(problem or _table(found, count))
    return 0 if found["equal"] else 1


def _run(wanted: Asked, request: Mapping[str, object], made: list[RunFolder]) -> RunFolder:
    variables = {**wanted.job.environment_variables, VARIABLE: json.dumps(request)}
    labelled = dataclasses.replace(
        wanted,
        job=dataclasses.replace(wanted.job, environment_variables=variables),
        tags={**wanted.tags, "check": "one process" if "against" not in request else "several"},
        display_name=None,
    )
    made.append(labelled.submit(Workspace.from_config().path))
    return made[-1]


def _end(folder: RunFolder) -> RunRecord:
    """Wait for the run's end. Return its record. Ctrl-C cancels the run."""
    try:
        # Poll at short intervals at first, because most runs of `paceline check` take only seconds.
        pause = 0.05
        while not (record := read.record(folder)).is_terminal:
            time.sleep(pause)
            pause = min(pause * 1.2, 0.5)
        return record
    except KeyboardInterrupt:
        read.request_cancel(folder, by=user_name(), reason="Ctrl-C")
        raise


def _outcome(folder: RunFolder) -> StepComparison:
    return cast("StepComparison", read_json(folder.outputs / FOLDER / OUTCOME) or {})


def _problem(record: RunRecord, outcome: StepComparison, steps: int, where: str, name: str) -> str:
    """Return why a run can't be compared step by step, or ""."""
    see = f"See `paceline logs {record.run_id}`."
    if record.status != states.COMPLETED:
        why = record.failure.exception or record.failure.message if record.failure is not None else record.status
        return f"{name} does not come to step {steps} {where}: {visible(str(why))}. {see}"
    if not outcome:
        return (
            f"{name} ended {where} without a step: it calls no par.step(batch) of a paceline.parallelize(...). Compare a script "
            f"that does. {see}"
        )
    if outcome["steps"] < steps:
        return f"{name} ended {where} after {outcome['steps']} of {steps} steps. Give --steps {outcome['steps']}. {see}"
    return ""


def _table(found: StepComparison, count: int) -> str:
    layout = visible(str(found["layout"]))
    kind = "float64" if found["precision"] == "float64" else "the script's own type"
    lines = [f"{found['steps']} steps in {kind}: one process, and {count} workers ({layout})"]
    for number, (one, many) in enumerate(zip(found["one_losses"], found["losses"], strict=True), 1):
        lines.append(f"  loss of step {number}   {one:<22.15g} {many:.15g}")
    limit = f"up to {found['limit']:.0e} is rounding"
    if "parameters_apart" not in found:
        lines.append(f"  losses within {found['losses_apart']:.1e}; {limit}")
        lines.append("  parameters are not compared: the model computes in a type of fewer digits")
    else:
        name = visible(found["parameter"])
        lines.append(f"  parameters and buffers within {found['parameters_apart']:.1e}, most in {name}; {limit}")
    if (memory := found.get("memory")) is not None:
        lines.append(
            f"  each worker needs {size_text(memory['needed_bytes'])} and what a step computes, in the script's own type; "
            f"{size_text(memory['free_bytes'])} are there ({visible(str(memory['limit']))})"
        )
    if found.get("missing"):
        lines.append(f"  on one side alone: {visible(', '.join(found['missing'][:5]))}")
    lines.append(
        "equal" if found["equal"] else "They differ. par.check(batch) in the script names the gradients that do."
    )
    return "\n".join(lines)
