"""compute add, list, show, login, remove, doctor: the machines that runs may be given."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from paceline.cli import completing
from paceline.cli.common import print_fields, print_json, print_table, warn
from paceline.cli.compute_add import add
from paceline.cli.compute_doctor import doctor
from paceline.cli.durations import duration_option
from paceline.cli.shared_options import Json
from paceline.errors import TargetError
from paceline.runs import read
from paceline.system.names import some
from paceline.targets import configured
from paceline.targets.kinds import load_errors
from paceline.targets.looks import TargetLook, counts_text, look, look_at_all
from paceline.workspace import Workspace

Timeout = Annotated[float, duration_option("--timeout", least=0.1, help="Wait so long for an answer.")]

#: More runs that use a target are counted, not named.
_RUNS_SHOWN = 3


Name = Annotated[str, typer.Argument(help="The compute target.", autocompletion=completing.targets)]

verbs = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
# The options are those of the kind, so the words are read by `add` itself, its --help included.
_AS_THEY_ARE = {"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []}
verbs.command("add", context_settings=_AS_THEY_ARE, add_help_option=False)(add)


@verbs.command("list")
def list_targets(timeout_s: Timeout = 15.0, as_json: Json = False) -> None:
    """The compute targets: nodes, free cores and GPUs, who waits. All are asked at once."""
    workspace_dir = Workspace.from_config(create=False).path
    looks = look_at_all(workspace_dir, configured.names(workspace_dir), timeout_s)
    broken = load_errors()
    if as_json:
        print_json({"targets": [found.to_json(with_nodes=False) for found in looks], "load_errors": broken})
        return
    print_table(("TARGET", "KIND", "STATE", "NODES", "CORES FREE", "GPUS FREE", "QUEUED"), map(_row, looks))
    for found in looks:
        if found.error:
            warn(f"paceline: {found.name}: {found.error}")
    for message in broken.values():
        warn(f"paceline: {message}")


@verbs.command("show")
def show(name: Name, timeout_s: Timeout = 30.0, as_json: Json = False) -> None:
    """A compute target's settings, its nodes and its queue."""
    workspace_dir = Workspace.from_config(create=False).path
    found = look(workspace_dir, name, timeout_s)
    if as_json:
        print_json(found.to_json())
        return
    lines = [("Target", found.name), ("Kind", found.kind or "?"), ("State", found.state)]
    lines += [(f"  {key}", _setting_text(value)) for key, value in found.settings.items()]
    status = found.status
    if status is not None:
        jobs = [f"{number} {word}" for number, word in ((status.running, "running"), (status.queued, "waiting"))
                if number is not None]  # fmt: skip
        lines += [("Jobs", ", ".join(jobs)), ("", status.message)]
    width = max(12, *(len(key) + 1 for key, _ in lines))
    print_fields(lines, width=width + 1)
    if status is not None and status.nodes:
        print()
        print_table(
            ("NODE", "STATE", "CORES FREE", "GPUS FREE", ""),
            [
                (
                    node.name,
                    node.state,
                    counts_text(node.cores, node.used_cores),
                    counts_text(node.gpus, node.used_gpus),
                    node.message,
                )
                for node in status.nodes
            ],
        )
    if found.error:
        warn(f"paceline: {found.name}: {found.error}")


@verbs.command("login")
def login(name: Name) -> None:
    """Log in where a target asks for a password or a second factor; what follows uses the connection."""
    workspace_dir = Workspace.from_config(create=False).path
    described = configured.read(workspace_dir, name)
    target: Any = described.make()
    if not hasattr(target, "login"):
        raise TargetError(f"compute target {name!r} is of kind {described.kind!r}, which needs no login of this sort.")
    if not sys.stdin.isatty():
        raise TargetError(f"compute target {name!r}: a login needs a person at a terminal. Call it from one.")
    target.login()


@verbs.command("remove")
def remove(
    name: Name,
    force: Annotated[bool, typer.Option("--force", help="Also while runs that have not ended use it.")] = False,
) -> None:
    """Forget a compute target. Its runs keep their copy of the settings; nothing is stopped."""
    workspace = Workspace.from_config(create=False)
    # The first name is `local`, which is in use by most runs and is refused below for another reason.
    if not force and name in configured.names(workspace.path)[1:]:
        using = [
            record.run_id
            for record in read.all_records(workspace.runs_dir)
            if record.target == name and not record.is_terminal
        ]
        if using:
            raise TargetError(
                f"compute target {name!r} is used by {some(using, _RUNS_SHOWN)}. Cancel or wait for them, or give --force: "
                "they go on with the copy of its settings that they have."
            )
    configured.remove(workspace.path, name)
    print(f"{name} is no longer a compute target of this workspace.")


verbs.command("doctor")(doctor)


def _row(found: TargetLook) -> tuple[str, ...]:
    status = found.status
    if status is None:
        return (found.name, found.kind or "?", found.state, "", "", "", "")
    nodes = (
        f"{len(status.up)} of {len(status.nodes)}" if len(status.up) != len(status.nodes) else str(len(status.nodes))
    )
    return (
        found.name,
        found.kind or "?",
        found.state,
        nodes,
        counts_text(status.cores, status.used_cores),
        counts_text(status.gpus, status.used_gpus),
        "" if status.queued is None else str(status.queued),
    )


def _setting_text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
