"""Names of a source tree that a snapshot does not copy: those that a run's working folder links to, and earlier results."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from paceline.system.files import read_json, write_json
from paceline.system.names import counted
from paceline.system.sizes import size_text

#: Folders into which scripts write their results. One that git does not track and that holds no Python is of earlier runs.
RESULTS = frozenset(
    {
        *("out", "output", "outputs", "runs", "logs", "wandb", "lightning_logs", "mlruns", "tb_logs", "tensorboard"),
        *("multirun", "multiruns"),
    }
)
#: Reason for a folder of installed packages, which nobody asks about.
VIRTUAL_ENVIRONMENT = "a virtual environment"
#: So many files are counted in all. A folder beyond that has "at least" so many.
_COUNTED = 10_000
#: So many names are in a line.
_SHOWN = 4
#: Reason for a file of passwords, tokens or keys that git does not track.
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

    path: relative to the source folder, with forward slashes. why: the rule that left it out, such as "ignored by .gitignore".
    is_linked: whether the working folder links to it; False for results of earlier runs. files, size: of a folder, all that is
    below it, size in bytes. changed_ns: the latest time of change. is_whole: False where more was there than was counted.
    """

    path: str
    why: str
    is_linked: bool
    is_folder: bool = False
    files: int = 0
    size: int = 0
    changed_ns: int = 0
    is_whole: bool = True

    def __str__(self) -> str:
        name = f"{self.path}/" if self.is_folder else self.path
        if self.why == VIRTUAL_ENVIRONMENT:
            return f"{name} ({self.why})"
        least = "" if self.is_whole else "at least "
        count = f"{least}{counted(self.files, 'file')}, " if self.is_folder else ""
        return f"{name} ({count}{size_text(self.size)}; {self.why})"


def line(found: Sequence[NotCopied]) -> str | None:
    """Return one line on what a run's working folder links to; None where it links to nothing."""
    linked = [one for one in found if one.is_linked and one.why != VIRTUAL_ENVIRONMENT]
    if not linked:
        return None
    # Secrets first, then data: what is large.
    shown = sorted(linked, key=lambda one: (one.why != SECRET, -one.size))[:_SHOWN]
    more = f", and {len(linked) - _SHOWN} more (paceline show)" if len(linked) > _SHOWN else ""
    return f"Not copied, linked in place: {', '.join(map(str, shown))}{more}"


def is_secret(name: str, *, is_folder: bool = False) -> bool:
    """Return whether a file of this name, or a hidden folder, holds passwords, tokens or keys."""
    return (not is_folder or name.startswith(".")) and re.fullmatch(_SECRET, name) is not None


def measured(source: Path, found: Iterable[NotCopied]) -> list[NotCopied]:
    """Return the same names with the numbers, sizes and times of their files."""
    left = _COUNTED
    done = []
    for one in found:
        files = size = changed = 0
        is_whole = True
        is_counted = one.why != VIRTUAL_ENVIRONMENT
        for stat in _stats(os.path.join(source, one.path)) if is_counted else ():
            if files >= left:
                is_whole = False
                break
            files, size, changed = files + 1, size + stat.st_size, max(changed, stat.st_mtime_ns)
        left -= files
        done.append(replace(one, files=files, size=size, changed_ns=changed, is_whole=is_whole))
    return done


def _stats(path: str) -> Iterator[os.stat_result]:
    """Yield the status of a file, or of each file below a folder; links to files are followed, links to folders are not."""
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


def file_of(snapshot: Path, source: Path) -> Path:
    """Return the file with the names that `snapshot` of `source` has not: equal trees at several places share one snapshot."""
    import hashlib  # not for a supervisor, which only reads

    key = hashlib.sha256(os.fsencode(os.path.realpath(source))).hexdigest()[:16]
    return snapshot.parent / ".linked" / f"{snapshot.name}-{key}.json"


def files_of(snapshot: Path) -> list[Path]:
    """Return these files of a snapshot, of all places."""
    return list((snapshot.parent / ".linked").glob(f"{snapshot.name}-*.json"))


def write(path: Path, found: Iterable[NotCopied]) -> None:
    """Write the names, for `read`."""
    write_json(path, {"not_copied": [asdict(one) for one in found]})


def read(path: Path) -> list[NotCopied]:
    """Return the names that `write` wrote; none where there is no such file, or another one."""
    told = read_json(path)
    listed = told.get("not_copied") if isinstance(told, Mapping) else None
    try:
        return [NotCopied(**one) for one in listed or ()]
    except TypeError:
        return []
