"""The list of a backup's files, checked on reading because other users could have changed the list.

Each entry has a file's path in the workspace and its content's SHA-256. Links are relative and stay in the workspace.
The list has no files with tokens, keys or passwords (`NEVER`), and no folders that Paceline can recreate.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.data.stores.names import check_relative, check_tree
from paceline.data.transfer.blobs import SHA256
from paceline.errors import DataError
from paceline.system.serialization import known_fields, plain_fields

VERSION = 1
#: Folder of the workspace that a backup includes -> pattern of the names in this folder that the backup excludes.
KEPT = {
    "runs": r"\..*",
    "snapshots": r"\..*",
    "models": r"\.parts|\.lock",
    "datasets": r"\.lock",
    "datastores": r"\.lock",
    "compute": r"\.lock",
    "environments": r"(?!registered$).*",
    "names": r".*\.lock|\.lock",
    "pipelines": r"\.lock",
    "views": r"\.lock",
    "templates": r"\..*",
    "schedules": r"\..*",
    "data": r"\.lock",
}
#: Names in a run's folder that a backup excludes: secrets, and files that only the run's live processes need.
NEVER = re.compile(r"secrets\.json|exec_key|exec|session|lock|ballast|closing|\.incoming|\.seen-.*|\..*\.deleted.*")
_ID = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{8}")
_KINDS = ("file", "folder", "link")
#: The latest modification time of an entry, in nanoseconds since 1970.
LATEST_NS = (1 << 63) - 1


class BackupEntry(NamedTuple):
    """A file, folder or link of a backup.

    Attributes:
        kind: "file", "folder" or "link".
        name: Path relative to the workspace.
        size: Size of a file in bytes; 0 for a folder or link.
        sha256: SHA-256 of a file's content in hexadecimal digits; "" for a folder or link.
        target: Target of a link, relative to the link's folder and normalized; "" for a file or folder.
        is_shared: Whether the file had several hard links.
    """

    kind: str
    name: str
    mode: int = 0o644
    mtime_ns: int = 0
    size: int = 0
    sha256: str = ""
    target: str = ""
    is_shared: bool = False

    @property
    def unit(self) -> str:
        """The run or model to which the entry belongs, such as "runs/ID" or "models/digits"."""
        return "/".join(self.name.split("/")[:2])


@dataclass(frozen=True, kw_only=True)
class Backup:
    """A complete backup.

    Attributes:
        id: Time and random digits, so that ids sort by time.
        workspace: Name of the workspace's folder.
        files, size_bytes: Number and size of the files that the backup restores.
        left_out: Number of files that the backup could not include.
        manifest: SHA-256 of the list of the backup's files. The datastore stores this list like a file's content.
    """

    id: str
    created_utc: str
    created_by: str
    host: str
    workspace: str
    files: int
    size_bytes: int
    left_out: int
    manifest: str
    manifest_bytes: int
    version: int = field(default=VERSION)

    def to_json(self) -> dict[str, object]:
        return plain_fields(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str) -> Backup:
        """Parse the JSON of a backup. `where`: the backups' folder, for errors."""
        try:
            backup = cls(**known_fields(cls, data))
            texts = (backup.created_utc, backup.created_by, backup.host, backup.workspace)
            numbers = (backup.files, backup.size_bytes, backup.left_out, backup.manifest_bytes)
            is_valid = bool(_ID.fullmatch(backup.id)) and bool(SHA256.fullmatch(backup.manifest))
            is_valid = is_valid and all(isinstance(text, str) for text in texts) and all(map(_is_count, numbers))
        except (TypeError, AttributeError):
            is_valid = False
        if not is_valid or backup.version != VERSION:
            raise DataError(f"a document in {where} is not a valid backup, or a newer Paceline has written it.")
        return backup


def is_backup_id(text: str) -> bool:
    """Return whether a text has the form of a backup's id."""
    return _ID.fullmatch(text) is not None


def is_kept(name: str) -> bool:
    """Return whether backups include this path of the workspace."""
    top, _, rest = name.partition("/")
    if top not in KEPT:
        return False
    second, _, inside = rest.partition("/")
    if second and re.fullmatch(KEPT[top], second):
        return False
    return top != "runs" or not inside or NEVER.fullmatch(inside.partition("/")[0]) is None


def link_target(name: str, target: str) -> str | None:
    """Return a link's normalized target; None if backups exclude the target.

    A normalized target has `..` only at its beginning. Therefore no chain of normalized links leaves the workspace.
    """
    if os.path.isabs(target) or "\0" in target or not target:
        return None
    folder = os.path.dirname(name)
    meant = os.path.normpath(os.path.join(folder, target))
    return os.path.relpath(meant, folder) if is_kept(meant) else None


def to_bytes(entries: Iterable[BackupEntry]) -> bytes:
    """Return the list of a backup's files as JSON."""
    return json.dumps({"version": VERSION, "entries": [list(entry) for entry in entries]}).encode()


def from_bytes(data: bytes, where: str) -> list[BackupEntry]:
    """Parse the list of a backup's files.

    Raises:
        DataError: A name or a link leaves the workspace; a name occurs twice or is excluded from backups; or a size, a
            mode or a hash is not valid. The message names the backups' folder, `where`.
    """
    try:
        entries = [BackupEntry(*values) for values in json.loads(data)["entries"]]
        for entry in entries:
            check_relative(entry.name, where)
            if not is_allowed(entry):
                raise DataError(
                    f"the list of files of a backup in {where} has {entry.name!r}, which no backup has. Nothing was restored: "
                    "name another backup, and find out who can write to the store."
                )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"the list of files of a backup in {where} is not valid: {error}. Name another backup."
        ) from error
    names = [entry.name for entry in entries]
    if len(set(names)) != len(names):
        raise DataError(f"the list of files of a backup in {where} names a file twice. Name another backup.")
    # Refuse a file below a symbolic link: the restore would write the file into the folder to which the link points.
    folders = {entry.name for entry in entries if entry.kind == "folder"}
    check_tree([name for name in names if name not in folders], where)
    return entries


def is_allowed(entry: BackupEntry) -> bool:
    """Return whether a backup may have this entry."""
    is_valid = (
        entry.kind in _KINDS
        and is_kept(entry.name)
        and all(map(_is_count, (entry.mode, entry.mtime_ns, entry.size)))
        and entry.mode <= 0o777
        and entry.mtime_ns <= LATEST_NS
        and isinstance(entry.is_shared, bool)
        and ("/" in entry.name or entry.kind == "folder")
    )
    if entry.kind == "file":
        is_valid = is_valid and SHA256.fullmatch(entry.sha256) is not None
    elif entry.kind == "link":
        is_valid = is_valid and link_target(entry.name, entry.target) == entry.target
    return is_valid


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0
