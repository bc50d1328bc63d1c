"""backup create, list, verify, restore, remove: backups of the workspace in a datastore."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, cast

from paceline import workspace_dir
from paceline.backups import create as making
from paceline.backups import place as places
from paceline.backups import restore as restoring
from paceline.cli.common import print_json, print_list, refuse, warn
from paceline.cli.options import JSON, VerbOption, takes
from paceline.data.transfer.progress import size_text, terminal_bar
from paceline.errors import DataError, UserError
from paceline.runs.visible import visible
from paceline.system.names import counted, some
from paceline.workspace import Workspace

if TYPE_CHECKING:
    from paceline.backups.manifest import Backup
    from paceline.cli.outputs import BackupRow, CreatedBackup, RemovedBackups, RestoredBackup, VerifiedBackup

PLACE = VerbOption(
    "place",
    "A datastore, a folder of it, a URL, or an absolute path.",
    "STORE[:PATH]",
    complete="datastores",
    needed=True,
)
BACKUP = VerbOption("backup_id", "Id of the backup; default: the newest.", "[BACKUP]")
_SHOWN = 5


@takes(
    PLACE,
    VerbOption("--keep", "Afterwards remove all but the newest N backups.", "N", int, least=1),
    VerbOption("--verify", "Read all stored contents, and store damaged ones again.", type=bool),
    JSON,
)
def create(*, place: str, keep: int | None, verify: bool, as_json: bool) -> None:
    """Store a backup of the workspace. Sends only new contents. Runs may go on."""
    workspace = Workspace.from_config(create=False).path
    if not workspace.is_dir():
        raise UserError(f"there is no workspace {str(workspace)!r}, so there is nothing to back up.")
    made = making.create(workspace, places.place(place), verify=verify, keep=keep)
    if as_json:
        found: CreatedBackup = {
            "backup": _row(made.backup),
            "stored": made.stored,
            "stored_bytes": made.stored_bytes,
            "left_out": [{"name": name, "why": why} for name, why in made.left_out],
            "removed": list(made.removed),
            "freed_bytes": made.freed_bytes,
        }
        print_json(found)
        return
    for name, why in made.left_out[:_SHOWN]:
        warn(f"paceline: {name} is left out: {why}")
    if len(made.left_out) > _SHOWN:
        warn(f"paceline: {len(made.left_out) - _SHOWN} more are left out; --json lists them.")
    print(
        f"{made.backup.id}: {counted(made.backup.files, 'file')}, {size_text(made.backup.size_bytes)}; "
        f"{size_text(made.stored_bytes)} in {counted(made.stored, 'new content')} sent"
    )
    if made.removed:
        print(f"Removed {some(list(made.removed), _SHOWN)}: {size_text(made.freed_bytes)} freed")


@takes(PLACE, JSON)
def list_backups(*, place: str, as_json: bool) -> None:
    """List the backups in a datastore, oldest first."""
    with places.open_backups(Workspace.from_config(create=False).path, places.place(place)) as backups:
        found = backups.all()
    print_list(
        found,
        {
            "BACKUP": lambda backup: backup.id,
            "WORKSPACE": lambda backup: visible(f"{backup.workspace} on {backup.host}"),
            "BY": lambda backup: visible(backup.created_by),
            "FILES": lambda backup: str(backup.files),
            "SIZE": lambda backup: size_text(backup.size_bytes),
        },
        as_json=as_json,
        to_json=_row,
        none=f"There is no backup at {place}. `paceline backup create {place}` makes one.",
    )


@takes(PLACE, BACKUP, JSON)
def verify(*, place: str, backup_id: str | None, as_json: bool) -> int:
    """Read every byte of a backup, and compare the hashes. Exits with 1 if they differ."""
    backup, damaged = restoring.verify(Workspace.from_config(create=False).path, places.place(place), backup_id)
    if as_json:
        found: VerifiedBackup = {"backup": _row(backup), "damaged": damaged}
        print_json(found)
    elif damaged:
        for name in damaged:
            print(visible(name))
        warn(f"paceline: {counted(len(damaged), 'file')} of {backup.id} can't be restored.")
    else:
        print(f"{backup.id} is whole: {counted(backup.files, 'file')}, {size_text(backup.size_bytes)}")
    return int(bool(damaged))


@takes(
    PLACE,
    BACKUP,
    VerbOption("--into", "Folder that becomes the workspace; default: the present workspace.", "FOLDER", Path),
    VerbOption("--run", "Restore only this run, its children and their code.", "RUN"),
    JSON,
)
def restore(*, place: str, backup_id: str | None, into: Path | None, run: str | None, as_json: bool) -> None:
    """Restore a backup, or one run of it.

    Existing files stay unchanged. A second call continues an interrupted one.
    """
    workspace = Workspace.from_config(create=False).path
    bar = terminal_bar("restoring")
    done = restoring.restore(
        workspace, places.place(place), backup_id, into=into.absolute() if into else None, run=run, progress=bar
    )
    if as_json:
        found: RestoredBackup = {
            "backup": _row(done.backup),
            "folder": str(done.folder),
            "files": done.files,
            "size_bytes": done.size_bytes,
            "ended": list(done.ended),
            "kept": list(done.kept),
        }
        print_json(found)
        return
    print(
        f"{done.backup.id}: {counted(done.files, 'file')}, {size_text(done.size_bytes)}, restored to {visible(str(done.folder))}"
    )
    if done.ended:
        print(f"Failed, because they went on when the backup was made: {some(list(done.ended), _SHOWN)}")
    if done.kept:
        print(f"There already, and not replaced: {some(list(done.kept), _SHOWN)}")
    if not workspace_dir.is_known(done.folder):
        print(
            "Its files can start programs as you. If you trust everybody who can write to the store: "
            f"paceline trust {shlex.quote(str(done.folder))}"
        )


@takes(
    PLACE,
    VerbOption("backup_ids", "Backups to remove.", "[BACKUP]...", list),
    VerbOption("--keep", "Remove all but the newest N backups.", "N", int, least=1),
    JSON,
)
def remove(*, place: str, backup_ids: list[str], keep: int | None, as_json: bool) -> None:
    """Remove backups, and the contents that no other backup needs."""
    refuse(DataError, (bool(backup_ids) == (keep is not None), "name backups to remove, or give --keep N."))
    workspace = Workspace.from_config(create=False).path
    with places.open_backups(workspace, places.place(place)) as backups, backups.locked() as check_lock:
        chosen = [backups.get(backup_id) for backup_id in backup_ids] or backups.all()[: -cast(int, keep)]
        freed = backups.remove(chosen, check_lock) if chosen else 0
    if as_json:
        found: RemovedBackups = {"removed": [backup.id for backup in chosen], "freed_bytes": freed}
        print_json(found)
        return
    for backup in chosen:
        print(f"{backup.id}: removed")
    print(f"{size_text(freed)} freed")


def _row(backup: Backup) -> BackupRow:
    return {
        "id": backup.id,
        "created_utc": backup.created_utc,
        "created_by": backup.created_by,
        "host": backup.host,
        "workspace": backup.workspace,
        "files": backup.files,
        "size_bytes": backup.size_bytes,
        "left_out_count": backup.left_out,
    }


verbs = {"create": create, "list": list_backups, "verify": verify, "restore": restore, "remove": remove}
