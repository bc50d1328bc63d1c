"""Files of a source folder that its snapshot lacks: runs get links to them, or copies."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from paceline.system.files import read_json, walk_files, write_json
from paceline.system.names import counted
from paceline.system.serialization import known_fields
from paceline.system.units import size_text

#: Names of folders for results. A folder that git does not track and that holds no Python belongs to earlier runs.
RESULTS = frozenset(
    {
        *("out", "output", "outputs", "runs", "logs", "wandb", "lightning_logs", "mlruns", "tb_logs", "tensorboard"),
        *("multirun", "multiruns"),
    }
)
_KINDS: dict[object, type] = {"str": str, "bool": bool, "int": int}
#: Reason for not copying a folder of installed packages. Users get no message about such folders.
VIRTUAL_ENVIRONMENT = "a virtual environment"
#: Reason for not copying a file that the user has declared secret.
VALUES = "its values are secrets"
#: Maximum number of files to count in all, and in each folder; beyond that, the text says "at least" this many.
_COUNTED, _LEAST_COUNTED = 10_000, 100
#: Maximum number of uncopied files and folders that a message names.
_SHOWN = 4
#: Maximum number of bytes to send unasked to machines without the user's folders: a minute or two at 100 Mbit/s.
SEND_BYTES = 1_000_000_000
TOO_MUCH = "more than 1 GB or 10,000 files in all"
_OWN = "a program's own"
#: Names of folders that are never sent to another machine.
_NEVER_SENT = frozenset({".git", ".paceline", "__pycache__", ".ipynb_checkpoints"})
#: Reason for not sending a file of passwords, tokens or keys that git does not track.
SECRET = "its name is that of a secret"
#: Names of files and folders that hold passwords, tokens and keys.
_SECRET = (
    r"(?i).*\.env|\.env\..*|\.envrc|[._]netrc|\.pgpass|\.npmrc|\.pypirc|\.htpasswd|\.git-credentials|\.(ssh|aws|gnupg|kube|docker)"
    r"|.*\.(pem|key|p12|pfx|jks|keystore|kdbx|ppk)|id_(rsa|dsa|ecdsa|ed25519)|kaggle\.json"
    r"|[._]?(credentials?|secrets?|token|service[_-]account.*)(\.(json|ya?ml|toml|txt|ini|cfg))?"
)


@dataclass(frozen=True, kw_only=True)
class NotCopied:
    """A file or folder of the source that is not in the snapshot.

    Attributes:
        path: Path relative to the source folder, with forward slashes.
        why: The rule that excluded it from the copy, such as "ignored by .gitignore".
        is_linked: Whether the run's working folder has a link to it; False for results of earlier runs.
        files: Number of files below a folder.
        size: Bytes of the file, or of all counted files of a folder.
        changed_ns: The latest modification time in nanoseconds.
        is_whole: Whether all files of the folder were counted.
        is_sent: Whether Paceline sends the file or folder to machines that do not see the user's folders.
        kept_back: The reason why Paceline does not send it; "" if Paceline sends it, or if the target is this machine.
    """

    path: str
    why: str
    is_linked: bool
    is_folder: bool = False
    files: int = 0
    size: int = 0
    changed_ns: int = 0
    is_whole: bool = True
    is_sent: bool = False
    kept_back: str = ""

    def __str__(self) -> str:
        name = f"{self.path}/" if self.is_folder else self.path
        if self.why == VIRTUAL_ENVIRONMENT:
            return f"{name} ({self.why})"
        least = "" if self.is_whole else "at least "
        count = f"{least}{counted(self.files, 'file')}, " if self.is_folder else ""
        return f"{name} ({count}{size_text(self.size)}; {self.why})"


def lines(found: Sequence[NotCopied], top: str = "") -> list[str]:
    """Return messages that list files outside the snapshot and how the run gets them.

    top: The source folder, relative to the user's working directory.
    """
    linked = [one for one in found if one.is_linked and one.why != VIRTUAL_ENVIRONMENT]
    if not any(one.is_sent or one.kept_back for one in linked):
        return [f"Not copied, linked in place: {_names(linked)}"] if linked else []
    said = []
    if sent := [one for one in linked if one.is_sent]:
        said.append(f"Not copied, linked on machines that see it, sent to others: {_names(sent)}")
    import shlex  # imported here because a supervisor does not need it

    if large := [one for one in linked if one.kept_back == TOO_MUCH]:
        first = os.path.normpath(os.path.join(top, max(large, key=lambda one: one.size).path))
        said.append(
            f"Not sent to machines that do not see it ({TOO_MUCH}): {_names(large)}. To send it: --send {shlex.quote(first)}, "
            "or put it into a datastore and name that: --input NAME=STORE:PATH."
        )
    return said


def text_of(one: NotCopied) -> str:
    """Return a line that says whether a file outside the snapshot is linked or sent."""
    if not one.is_linked:
        return f"{one}; not linked"
    return (
        f"{one}; sent where it is not seen"
        if one.is_sent
        else f"{one}{'; not sent: ' * bool(one.kept_back)}{one.kept_back}"
    )


def _names(found: Sequence[NotCopied]) -> str:
    # List secrets first, then the largest data.
    shown = sorted(found, key=lambda one: (one.why != SECRET, -one.size))[:_SHOWN]
    more = f", and {len(found) - _SHOWN} more (paceline show)" if len(found) > _SHOWN else ""
    return f"{', '.join(map(str, shown))}{more}"


def is_secret(name: str, *, is_folder: bool = False) -> bool:
    """Return whether a file or folder with this name likely holds secrets."""
    return (not is_folder or name.startswith(".")) and re.fullmatch(_SECRET, name) is not None


def measured(source: Path, found: Iterable[NotCopied]) -> list[NotCopied]:
    """Return the files and folders in `found` with their file counts, sizes and times."""
    left = _COUNTED
    done = []
    for one in found:
        files = size = changed = 0
        is_whole = True
        is_counted = one.why != VIRTUAL_ENVIRONMENT
        for stat in _stats(os.path.join(source, one.path)) if is_counted else ():
            if files >= max(left, _LEAST_COUNTED):
                is_whole = False
                break
            files, size, changed = files + 1, size + stat.st_size, max(changed, stat.st_mtime_ns)
        left -= files
        done.append(replace(one, files=files, size=size, changed_ns=changed, is_whole=is_whole))
    return done


def _stats(path: str) -> Iterator[os.stat_result]:
    try:
        if not os.path.isdir(path):
            yield os.stat(path)
            return
        with os.scandir(path) as found:
            entries = list(found)
    except OSError:
        return
    for entry in entries:
        try:
            if entry.is_dir():
                if not entry.is_symlink():
                    yield from _stats(entry.path)
            else:
                yield entry.stat()
        except OSError:
            continue


def with_sent(source: Path, found: Iterable[NotCopied], send: Collection[str]) -> list[NotCopied]:
    """Decide which files outside the snapshot go to machines without the user's folders.

    Args:
        source: The source folder.
        found: The result of `measured`.
        send: Paths relative to `source`, which are sent with all files below, of any size. Other files are sent too,
            the smallest first, up to SEND_BYTES and 10,000 files in all.

    Returns:
        The files of `found` and `send`, with their `is_sent` and `kept_back` set.
    """
    known = list(found)
    # `send` may also name a file or folder inside an excluded folder.
    parts = [
        NotCopied(path=path, why=one.why, is_linked=True, is_folder=os.path.isdir(os.path.join(source, path)))
        for path in send
        for one in known
        if path.startswith(f"{one.path}/")
    ]
    left_bytes, left_files = SEND_BYTES, _COUNTED
    why: dict[str, str] = {}
    for one in sorted((*known, *parts), key=lambda one: one.size):
        named = is_named(one.path, send)
        is_settled = not one.is_linked or one.why == VALUES
        why[one.path] = one.why if is_settled else kept_back(source, one.path, named=named)
        if why[one.path] or named:
            continue
        size = files = 0
        try:
            for _, path in sent_files(source, one.path, named=False):
                size, files = size + os.stat(path).st_size, files + 1
                if size > left_bytes or files > left_files:
                    why[one.path] = TOO_MUCH
                    break
            else:
                left_bytes, left_files = left_bytes - size, left_files - files
        except OSError as error:
            why[one.path] = f"it can't be read: {error.strerror}"
    marked = [*known, *measured(source, parts)]
    return [replace(one, is_sent=not why[one.path], kept_back=why[one.path]) for one in marked]


def is_named(path: str, send: Collection[str]) -> bool:
    """Return whether a path is in `send`, or below a folder in `send`."""
    return any(f"{path}/".startswith(f"{name}/") for name in send)


def sent_files(source: Path, path: str, *, named: bool) -> Iterator[tuple[str, Path]]:
    """Yield (name below `path`, local path) of each file to send at or below `source/path`.

    named: Whether the user has named the folder. If not, omit hidden folders and folders with results in it.

    Raises:
        OSError: The folder can't be read, or changes while it is read.
    """
    top = Path(source, path)
    if not top.is_dir():
        yield top.name, top
        return

    def is_open(entry: os.DirEntry[str]) -> bool:
        why = why_kept(entry.name, is_folder=entry.is_dir(), named=named)
        return not why and os.access(entry.path, os.R_OK) and not _is_environment(entry.path)

    found = ((name, entry) for name, entry, is_file in walk_files(top, is_open) if is_file and is_open(entry))
    yield from ((name, Path(entry.path)) for name, entry in found)


def kept_back(source: Path, path: str, *, named: bool) -> str:
    """Return why a file or folder may not be sent, or "". named: by the user, in `send`."""
    parts = path.split("/")
    if any(part in _NEVER_SENT for part in parts):
        return _OWN
    if any(_is_environment(os.path.join(source, *parts[:count])) for count in range(1, len(parts) + 1)):
        return VIRTUAL_ENVIRONMENT
    absolute = os.path.join(source, path)
    if not os.access(absolute, os.R_OK):
        return "it can't be read"
    is_folder = os.path.isdir(absolute)
    if not (is_folder or os.path.isfile(absolute)):
        return "neither a file nor a folder"
    # A file that the user has named is sent even if its name looks like the name of a secret.
    return "" if named else why_kept(parts[-1], is_folder=is_folder, named=False)


def why_kept(name: str, *, is_folder: bool, named: bool) -> str:
    """Return why Paceline sends no such file or folder to other machines, or "".

    named: Whether the user has requested to send a folder that contains the file or folder.
    """
    if re.fullmatch(_SECRET, name):
        return SECRET
    if not is_folder:
        return ""
    if name in _NEVER_SENT:
        return _OWN
    if named:
        return ""
    if name in RESULTS:
        return "its name is that of results"
    return "installed packages" if name == "node_modules" else "a hidden folder" if name.startswith(".") else ""


def _is_environment(path: str) -> bool:
    return os.path.exists(os.path.join(path, "pyvenv.cfg"))


def file_of(snapshot: Path, source: Path) -> Path:
    """Return the path of the list of files in `source` but not in `snapshot`."""
    import hashlib  # imported here because a supervisor does not need it

    key = hashlib.sha256(os.fsencode(os.path.realpath(source))).hexdigest()[:16]
    return snapshot.parent / ".linked" / f"{snapshot.name}-{key}.json"


def files_of(snapshot: Path) -> list[Path]:
    """Return the paths of a snapshot's lists of missing files, one per source folder."""
    return list((snapshot.parent / ".linked").glob(f"{snapshot.name}-*.json"))


def write(path: Path, found: Iterable[NotCopied]) -> None:
    """Write the list of files that a snapshot lacks."""
    write_json(path, {"not_copied": [asdict(one) for one in found]})


def read(path: Path) -> list[NotCopied]:
    """Return the list of files that `write` saved; [] if missing or invalid.

    In a shared workspace, another user may have written the list. So paths that lead out of the source are ignored.
    """
    told = read_json(path)
    listed = told.get("not_copied") if isinstance(told, Mapping) else None
    if not isinstance(listed, list):
        return []
    kinds = {field.name: _KINDS[field.type] for field in fields(NotCopied)}
    found = [NotCopied(**known_fields(NotCopied, one)) for one in listed if _is_one(one, kinds)]
    return found if len(found) == len(listed) else []


def _is_one(one: object, kinds: Mapping[str, type]) -> bool:
    if not isinstance(one, Mapping) or not {"path", "why", "is_linked"} <= {*one}:
        return False
    # In Python a bool is an int, so compare exact types.
    if any(type(value) is not kinds[name] for name, value in one.items() if name in kinds):
        return False
    parts = one["path"].split("/")
    return "\0" not in one["path"] and not any(part in ("", ".", "..") for part in parts)
