"""rm, restore, prune, trust: remove runs and unused files, bring runs back, and trust a workspace."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import workspace_dir
from paceline.cli.common import folders_of, print_json, print_list, print_table, state_named, warn
from paceline.cli.options import DRY_RUN, JSON, NAMED_RUNS, YES, Duration, VerbOption, takes
from paceline.data.transfer.cache import parse_size
from paceline.data.transfer.progress import size_text
from paceline.errors import FileNameError, PacelineError, RunNotFoundError, TargetError, UserError
from paceline.pruning import Pruned, PrunePolicy, Removed
from paceline.pruning import prune as prune_workspace
from paceline.runs import read, removal, tags_and_properties, trash
from paceline.runs.folder import RunFolder
from paceline.runs.trash import DeletedRun
from paceline.system.files import tree_size
from paceline.system.names import counted, some
from paceline.targets import configured
from paceline.targets.base import Cleared, Examined
from paceline.workspace import Workspace

if TYPE_CHECKING:
    from paceline.cli.outputs import DeletedRunJson, RemovedRun
    from paceline.remote.link.copies import LeftBehind


#: Before a removal, the question lists at most this many runs by name. So does an error message.
_NAMED = 5
_DECLINED = 1


@takes(
    NAMED_RUNS,
    VerbOption("--children", "Remove their child runs, too.", type=bool),
    VerbOption("--force", "Remove runs whose engine no longer answers (NotResponding), too.", type=bool),
    VerbOption("--purge", "Remove them for good, also runs in the trash. That frees the space at once.", type=bool),
    YES,
    DRY_RUN,
    JSON,
)
def rm(*, run_ids: list[str], children: bool, force: bool, purge: bool, yes: bool, dry_run: bool, as_json: bool) -> int:
    """Move ended runs to the trash, which keeps them for 7 days.

    Moves records, logs, metrics and outputs; `paceline restore` brings them back. Files that runs stored in other places stay.
    """
    workspace = Workspace.from_config(create=False)
    removal.sweep(workspace.runs_dir)
    found = [_in_trash(workspace.path, word) for word in run_ids] if purge else []
    in_trash = {run.folder: run for run in found if run is not None}
    words = [word for word in run_ids if word not in {folder.run_id for folder in in_trash}]
    folders = folders_of(words) if words else []
    if below := trash.below(workspace.runs_dir, folders) if folders else []:
        if not children:
            shown = some([folder.run_id for folder in below], _NAMED)
            raise UserError(f"there are runs below: {shown}. --children removes them as well.")
        folders = [*below, *folders]
    for folder in folders:
        removal.check_removable(read.record(folder), force=force)
    # Measure the runs' sizes before the runs are removed.
    there = [*folders, *in_trash]
    removed = [Removed(name=folder.run_id, size_bytes=tree_size(folder.path)) for folder in there]
    if not dry_run:
        names = [run.name for run in removed]
        more = ", ..." if len(names) > _NAMED else ""
        which = f"run {names[0]}" if len(names) == 1 else f"{len(names)} runs ({', '.join(names[:_NAMED])}{more})"
        how = (
            f"Remove {which}, {_total(removed)}, for good?"
            if purge
            else f"Move {which}, {_total(removed)}, to the trash?"
        )
        if not confirmed(how, yes=yes, as_json=as_json):
            return _DECLINED
        if purge:
            removed = [
                run
                for folder, run in zip(there, removed, strict=True)
                if _remove(folder, in_trash.get(folder), force=force)
            ]
        else:
            moved = trash.delete(workspace.runs_dir, [folder for folder in folders if folder not in below], force=force)
            removed = [run for run in removed if run.name in moved]
    if as_json:
        rows: list[RemovedRun] = [{"run_id": run.name, "size_bytes": run.size_bytes} for run in removed]
        print_json(rows)
    else:
        done = "removed" if purge else "in the trash"
        for run in removed:
            print(f"{run.name}: {'would be removed' if dry_run else done}, {size_text(run.size_bytes)}")
        if removed and not purge and not dry_run:
            print(
                f"The trash keeps them for {trash.KEPT_DAYS} days. Bring one back: paceline restore {removed[-1].name}"
            )
    return 0 if len(removed) == len(there) else 1


def _in_trash(workspace_dir: Path, run_id: str) -> DeletedRun | None:
    with contextlib.suppress(FileNameError):
        return trash.find(workspace_dir, run_id)
    return None


@takes(
    VerbOption(
        "run_ids",
        "Deleted runs: their ids, the beginnings of these, or their names; default: list them.",
        "[RUN]...",
        list,
    ),
    JSON,
)
def restore(*, run_ids: list[str], as_json: bool) -> None:
    """Bring deleted runs back from the trash, or list the trash."""
    workspace_dir = Workspace.from_config(create=False).path
    if not run_ids:
        print_list(
            trash.deleted(workspace_dir),
            {
                "RUN": lambda run: run.run_id,
                "NAME": lambda run: run.name,
                "DELETED": lambda run: f"{run.deleted_utc} by {run.deleted_by}",
                "KEPT UNTIL": lambda run: run.kept_until_utc,
            },
            as_json=as_json,
            to_json=_deleted_json,
            none=f"The trash of {workspace_dir} is empty.",
        )
        return
    there = trash.deleted(workspace_dir)
    found = [folder.run_id for run_id in run_ids for folder in trash.restore(workspace_dir, run_id, there)]
    if as_json:
        print_json(found)
    else:
        for run_id in found:
            print(f"{run_id}: restored")


def _deleted_json(run: DeletedRun) -> DeletedRunJson:
    return {
        "run_id": run.run_id,
        "display_name": run.name,
        "deleted_utc": run.deleted_utc,
        "deleted_by": run.deleted_by,
        "kept_until_utc": run.kept_until_utc,
        "with_run": run.with_run,
    }


@takes(
    VerbOption(
        "--older-than",
        "Only if it ended, or was last used, this long ago: 30d, 12h; a number alone is days.",
        type=Duration(unit="d"),
        name="older_than_s",
    ),
    VerbOption("--keep-last", "Keep the newest N runs of each experiment.", "N", int, least=0),
    VerbOption("--max-size", "Remove the oldest of each kind until SIZE is left, such as 20GB.", "SIZE"),
    VerbOption("--status", "Only runs in this state, such as Failed.", complete="run_states"),
    VerbOption("-e --experiment", "Only runs of this experiment.", complete="experiments"),
    VerbOption("--runs", "Only runs and other kinds that are named.", type=bool),
    VerbOption("--snapshots", "Only snapshots that no run uses, and other kinds that are named.", type=bool),
    VerbOption(
        "--environments", "Only environments, including those on images, and other kinds that are named.", type=bool
    ),
    VerbOption("--data", "Only this machine's cache of stores' files, and other kinds that are named.", type=bool),
    VerbOption("--models", "Only files that no version of a model uses, and other kinds that are named.", type=bool),
    VerbOption(
        "--compute",
        "What ended runs left on this target. Files that exist only on its nodes are fetched first.",
        "NAME",
        complete="targets",
    ),
    YES,
    DRY_RUN,
    JSON,
)
def prune(
    *,
    older_than_s: float | None,
    keep_last: int | None,
    max_size: str | None,
    status: str | None,
    experiment: str | None,
    runs: bool,
    snapshots: bool,
    environments: bool,
    data: bool,
    models: bool,
    compute: str | None,
    yes: bool,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Remove old runs and unused snapshots, environments and data.

    Keeps everything that an unfinished run uses, runs with the tag `keep`, and runs that made a model.
    """
    if compute is not None:
        criteria = (older_than_s, keep_last, max_size, status, experiment)
        if runs or snapshots or environments or data or models or any(value is not None for value in criteria):
            raise UserError(
                "--compute takes no other criterion: it removes files of ended runs on nodes, and nothing of the workspace."
            )
        return _prune_nodes(compute, yes=yes, dry_run=dry_run, as_json=as_json)
    policy = PrunePolicy(
        older_than_s=older_than_s,
        keep_last=keep_last,
        max_bytes=parse_size(max_size) if max_size is not None else None,
        status=state_named(status) if status is not None else None,
        experiment=experiment,
    )
    named = {"runs": runs, "snapshots": snapshots, "environments": environments, "data": data, "models": models}
    kinds = [kind for kind, is_named in named.items() if is_named]
    workspace_dir = Workspace.from_config(create=False).path
    # Do a dry run first, so that the question can tell the user what would be removed.
    if dry_run or not yes:
        found = prune_workspace(workspace_dir, policy, kinds, dry_run=True)
        if dry_run:
            return _tell(found, dry_run=True, as_json=as_json)
        if found:
            if not as_json:
                _print_removed(found)
            if not confirmed(f"Remove {_summary(found)}, for good?", yes=False, as_json=as_json):
                return _DECLINED
    # Search again, because new runs may have begun to use some of the files while the user answered the question.
    found = prune_workspace(workspace_dir, policy, kinds)
    return _tell(found, dry_run=False, as_json=as_json)


def _prune_nodes(name: str, *, yes: bool, dry_run: bool, as_json: bool) -> int:
    """Fetch and remove leftover files of ended runs on a compute target."""
    workspace = Workspace.from_config(create=False)
    described = configured.read(workspace.path, name)
    target = described.make()
    if not isinstance(target, (Cleared, Examined)):
        raise TargetError(f"compute target {name!r} is of kind {described.kind!r}, which gives no access to its nodes.")
    with contextlib.ExitStack() as held:
        links = [] if isinstance(target, Cleared) else held.enter_context(target.examine())
        lost = [link for link in links if link.lost]

        def cleared(is_trial: bool) -> list[LeftBehind]:
            if isinstance(target, Cleared):
                return list(target.clear(workspace.runs_dir, dry_run=is_trial))
            from paceline.remote.link.copies import clear_node

            living = (link for link in links if not link.lost)
            return [
                left
                for link in living
                for left in clear_node(link, link.hello.folder, workspace.runs_dir, dry_run=is_trial)
            ]

        found = cleared(True) if dry_run or not yes else []
        if found and not dry_run:
            if not as_json:
                _print_left(found, will_be=True)
            what = "object" if isinstance(target, Cleared) else "folder"
            if not confirmed(f"Remove {counted(len(found), what)} there?", yes=False, as_json=as_json):
                return _DECLINED
        if not dry_run and (found or yes):
            found = cleared(False)
    if as_json:
        print_json({"dry_run": dry_run, "nodes": [dataclasses.asdict(left) for left in found]})
    elif found:
        _print_left(found, will_be=dry_run)
    else:
        print("There is nothing to remove.")
    for link in lost:
        warn(f"paceline: {link.name} does not answer: {link.lost}")
    return 1 if lost or any(left.stays for left in found) else 0


def _remove(folder: RunFolder, deleted: DeletedRun | None, *, force: bool) -> bool:
    """Remove a run, also a `deleted` run in the trash. On failure print why and return False."""
    # Read the run's properties now, because the removal of the run deletes them.
    properties = tags_and_properties.read(folder.notes).properties
    left = [text for name, text in properties.items() if name.startswith(("not_fetched", "fetched_later"))]
    try:
        if deleted is not None:
            trash.purge(deleted)
        else:
            removal.remove(folder, force=force)
    except RunNotFoundError:
        pass  # another process has already removed the run
    except PacelineError as error:
        warn(f"paceline: error: {error}")
        return False
    if left:
        warn(f"{folder.run_id}: files stay on other machines: {' '.join(left)}")
    return True


def confirmed(question: str, *, yes: bool, as_json: bool) -> bool:
    """Return True if the user answers a question with yes, or `yes` is True.

    Raise UserError if no terminal can show the question.
    """
    if yes:
        return True
    if as_json or not sys.stdin.isatty():
        raise UserError(f"nothing was removed, because no terminal shows the question. Add --yes to answer: {question}")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    print("Nothing was removed.", file=sys.stderr)
    return False


def _tell(found: Pruned, *, dry_run: bool, as_json: bool) -> int:
    if as_json:
        print_json({"dry_run": dry_run, **found.to_json()})
    else:
        if dry_run:
            _print_removed(found)
        verb = "Would remove" if dry_run else "Removed"
        print(f"{verb} {_summary(found)}." if found else "There is nothing to remove.")
    for why in found.failed:
        warn(f"paceline: {why}")
    return 1 if found.failed else 0


def _print_removed(found: Pruned) -> None:
    rows = [
        *(("run", run.name, size_text(run.size_bytes)) for run in found.runs),
        *(("snapshot", one.name[:12], size_text(one.size_bytes)) for one in found.snapshots),
        *(("environment", one.name[:12], size_text(one.size_bytes)) for one in found.environments),
    ]
    if found.data_bytes:
        rows.append(("data", "cached files", size_text(found.data_bytes)))
    if found.models_bytes:
        rows.append(("models", "contents of no version", size_text(found.models_bytes)))
    if rows:
        print_table(("KIND", "NAME", "SIZE"), rows)


def _print_left(found: list[LeftBehind], *, will_be: bool) -> None:
    for left in found:
        print(f"{left.host}: {left.text(will_be=will_be)}")


def _summary(found: Pruned) -> str:
    parts = [
        f"{counted(len(gone), noun)} ({_total(gone)})"
        for noun, gone in (("run", found.runs), ("snapshot", found.snapshots), ("environment", found.environments))
        if gone
    ]
    if found.data_bytes:
        parts.append(f"{size_text(found.data_bytes)} of cached data")
    if found.models_bytes:
        parts.append(f"{size_text(found.models_bytes)} of no model")
    return ", ".join(parts) + (f": {size_text(found.size_bytes)}" if len(parts) > 1 else "")


def _total(gone: list[Removed] | tuple[Removed, ...]) -> str:
    return size_text(sum(one.size_bytes for one in gone))


@takes(VerbOption("folder", "The workspace's folder; default: ./.paceline.", "[FOLDER]", Path))
def trust(*, folder: Path | None) -> None:
    """Trust a workspace that you did not make on this machine.

    The workspace may be shared, unpacked or copied. Anyone who can write to a workspace can start programs as you, so trust a
    folder only if you trust its writers.
    """
    print(f"Trusted: {workspace_dir.trust(folder or Path(workspace_dir.DEFAULT_FOLDER))}")
