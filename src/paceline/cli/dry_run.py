"""--dry-run: print what a submission would start, without starting it."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.cli.common import print_json
from paceline.job.job import Job
from paceline.job.plan import Launch, NodeSetup
from paceline.job.secret_values import HIDDEN, shown
from paceline.job.sizes import range_text
from paceline.job_files import job_file
from paceline.job_files.description import Asked, whole
from paceline.launchers import environment, get_launcher
from paceline.runs.visible import visible
from paceline.runs.work_dir import place
from paceline.submit import check, check_source, not_copied, unrecorded, values_of
from paceline.system import linked
from paceline.targets import find_target
from paceline.targets.base import Queued
from paceline.workspace import Workspace

if TYPE_CHECKING:
    from paceline.cli.outputs import DryRun


def print_file(asked: Asked, description: Mapping[str, Any]) -> int:
    """Print the job as a job file for `paceline run`, with absolute paths."""
    workspace_dir = Workspace.from_config(create=False).path
    check_source(asked.job, asked.directory, workspace_dir)
    check(asked.job, workspace_dir)
    job, _ = unrecorded(asked.job, {})
    values = whole(description)
    if job.secrets != asked.job.secrets:
        variables = {
            name: v for name, v in values["environment_variables"].items() if name in job.environment_variables
        }
        secrets = {name: place for name, place in job.secrets.items() if name in values["environment_variables"]}
        values |= {"environment_variables": variables, "secrets": {**values.get("secrets", {}), **secrets}}
    print(job_file.text(values), end="")
    return 0


def print_plan(asked: Asked, *, as_json: bool) -> int:
    """Print a job, the commands that start its workers, and the workers' variables."""
    job = asked.job
    workspace = Workspace.from_config(create=False)
    check_source(job, asked.directory, workspace.path)
    # As in a real submission, raise an error if a secret has no value on this machine.
    job, values = unrecorded(job, asked.values)
    values_of(job, values)
    check(job, workspace.path)
    skipped = not_copied(job, asked.source, workspace.path, asked.leave_out)
    target = find_target(job.compute_target, workspace.path)
    granted = target.preview(job)
    script = target.script(job) if isinstance(target, Queued) else None
    given = job.resized(max(job.least_nodes, min(len(granted.nodes), job.node_count))) if job.node_range else job
    # Words in <> stand for folders and ports that Paceline only chooses when a run starts.
    run_dir = Path("<workspace>/runs/<run id>")
    at = place({"source_directory": str(asked.directory), "job": job.to_json()})
    launch = Launch(
        # Hide the values of secrets, because the environment is printed below.
        job=given.with_values(dict.fromkeys(job.secrets, HIDDEN)),
        run_id="<run id>",
        experiment=asked.experiment,
        workspace_name="<workspace>",
        run_dir=run_dir,
        work_dir=run_dir / "work" / at.directory,
        source_dir=run_dir / "work" / at.copy,
        scratch_dir=Path("<scratch folder>"),
        library_dir=Path("<library>"),
        nodes=granted.nodes,
        prepared=_prepared(given),
        ports=granted.ports,
        starter=granted.starter,
    )
    commands = [
        environment.with_paths(command, launch, environment.inherited(os.environ))
        for command in get_launcher(job.launcher).commands(launch)
    ]
    if as_json:
        found: DryRun = {
            "job": job.shown(),
            "source_directory": str(asked.directory),
            "not_copied": [asdict(one) for one in skipped],
            "commands": [
                {
                    "node_rank": command.node_rank,
                    "ranks": list(command.ranks),
                    "argv": list(command.argv),
                    "environment": shown({**command.defaults, **command.environment}),
                }
                for command in commands
            ],
        }
        if script is not None:
            found["script"] = script
        print_json(found)
        return 0
    print(f"Source: {asked.directory}")
    for one in skipped:
        text = visible(linked.text_of(one).removesuffix("; not linked"), lines=True)
        print(f"  {'linked in place' if one.is_linked else 'left out'}: {text}")
    print("Job:")
    for name, value in job.shown().items():
        print(f"  {name}: {value!r}")
    if script is not None:
        print(f"\nGiven to {job.compute_target}:\n\n{visible(script.rstrip(), lines=True)}")
    if job.environment.docker_image:
        print(f"\nIn containers of {job.environment.docker_image}:")
    if given.node_range:
        print(f"\nWith {given.node_count} of {range_text(*given.node_range)} nodes:")
    for command in commands:
        print(
            f"\nOn node {command.node_rank}, for rank {', '.join(map(str, command.ranks))}:\n"
            f"  {visible(shlex.join(command.argv), lines=True)}"
        )
        for name, value in sorted(shown({**command.defaults, **command.environment}).items()):
            print(f"    {name}={visible(shlex.quote(value), lines=True)}")
    print("\nNothing was started. Ports and folders in <> are chosen when the run starts.")
    return 0


def _prepared(job: Job) -> tuple[NodeSetup, ...]:
    environment = job.environment
    one = NodeSetup(python=environment.python or ("python3" if environment.docker_image else sys.executable))
    if environment.needs_build:
        folder = "<environment>"
        one = NodeSetup(
            python=f"{folder}/bin/python",
            variables={"CONDA_PREFIX" if environment.uses_conda else "VIRTUAL_ENV": folder},
            bin_dir=f"{folder}/bin",
            is_isolated=not environment.layered,
        )
    by_rank = tuple(reference.name for reference in job.inputs if reference.partition == "rank")
    inputs = {reference.name: f"<data>/{reference.name}" for reference in job.inputs}
    return (dataclasses.replace(one, inputs=inputs, inputs_by_rank=by_rank),) * job.node_count
