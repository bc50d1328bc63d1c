"""`./outputs` and `./logs` of a program that logs its own run: what appears in them while it runs is kept with the run."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from paceline.errors import PacelineError
from paceline.runs import artifacts
from paceline.runs.folder import RunFolder

_Seen = dict[str, tuple[int, int]]
#: Run folder -> each folder that is watched for it, the name that its files have in the run, and what of it is kept or was there.
_watched: dict[RunFolder, list[tuple[Path, str, _Seen]]] = {}


def begin(folder: RunFolder, outputs: Path) -> None:
    """Make `outputs`, and watch it and `./logs` for the run. A folder that can't be made is not watched."""
    if outputs.is_symlink():
        return  # in a worker `outputs` is the submitted run's own, not this one's
    folders = [(outputs.absolute(), "outputs"), (Path("logs").absolute(), "logs")]
    with contextlib.suppress(OSError):
        outputs.mkdir(parents=True, exist_ok=True)
    # What lies there from before belongs to no run, or to an earlier one.
    _watched[folder] = [(path, name, _stamps(path)) for path, name in folders]


def keep(folder: RunFolder) -> None:
    """Copy what is new or has changed since."""
    for path, name, seen in _watched.get(folder, ()):
        for inside, stamp in _stamps(path).items():
            if seen.get(inside) == stamp:
                continue
            kept = folder.path / name / inside
            # The program's own files may change until the run ends: the copy follows them.
            with contextlib.suppress(OSError, PacelineError):
                kept.unlink(missing_ok=True)
                artifacts.put(folder, f"{name}/{inside}", path / inside)
                seen[inside] = stamp


def end(folder: RunFolder) -> None:
    """Copy what is new, for the last time."""
    keep(folder)
    _watched.pop(folder, None)


def _stamps(top: Path) -> _Seen:
    found: _Seen = {}
    for where, _, names in os.walk(top):
        for name in names:
            path = os.path.join(where, name)
            with contextlib.suppress(OSError):
                # Neither links, which may lead anywhere, nor pipes.
                stat = os.lstat(path)
                if (stat.st_mode & 0o170000) == 0o100000:
                    found[os.path.relpath(path, top)] = (stat.st_mtime_ns, stat.st_size)
    return found
