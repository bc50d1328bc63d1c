"""The environments on top of images that are kept: which there are, which are in use, and the removal of the others."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.containers.layer import Layer, read_layer
from paceline.errors import EnvironmentBuildError
from paceline.system import locks


@dataclass(frozen=True, kw_only=True)
class KeptLayer:
    """A complete one. used_at: seconds since 1970 when a run last held it."""

    key: str
    layer: Layer
    used_at: float


def key_of(layer: Layer) -> str:
    """The name of a layer's folder."""
    return Path(layer.prefix).parent.name


def all_layers(folder: Path) -> list[KeptLayer]:
    """Return the layers in `<workspace>/environments/images`, the last used first."""
    found = []
    for path in folder.glob("*.json"):
        layer = read_layer(folder, path.stem)
        if layer is not None:
            found.append(KeptLayer(key=path.stem, layer=layer, used_at=_used_at(folder, path.stem)))
    return sorted(found, key=lambda kept: -kept.used_at)


@contextlib.contextmanager
def hold_layer(folder: Path, key: str) -> Iterator[None]:
    """While it lasts, the layer is not pruned; the kernel ends it with the process.

    Raises:
        EnvironmentBuildError: it has been pruned meanwhile; the next build makes it again.
    """
    # Shared: any number of runs use a layer at once, and `prune_layers` needs the lock for itself.
    with locks.shared(_lock(folder, key)) as fd:
        if read_layer(folder, key) is None:
            raise EnvironmentBuildError(f"environment {key} has just been pruned. Ask for it once more.")
        # The time of the lock's file is that of the last use, by which `prune_layers` goes.
        os.utime(fd)
        yield


def prune_layers(
    folder: Path, *, unused_for_s: float = 0.0, only: Collection[str] | None = None, dry_run: bool = False
) -> list[KeptLayer]:
    """Remove those that nobody holds and nobody has used for so long; what is gone.

    only: those with these keys. dry_run: only say what would go.
    """
    removed = []
    for kept in all_layers(folder):
        if only is not None and kept.key not in only:
            continue
        if time.time() - kept.used_at < unused_for_s:
            continue
        # The lock's file stays when the layer goes: a new file of that name would be another lock.
        fd = locks.take(_lock(folder, kept.key))
        if fd is None:
            # Somebody has it: a run that uses it, or a build.
            continue
        # Looked at again under the lock: a run may have used it since it was listed.
        if time.time() - _used_at(folder, kept.key) >= unused_for_s:
            removed.append(kept)
            if not dry_run:
                # First the record: without it the folder counts for nothing.
                (folder / f"{kept.key}.json").unlink(missing_ok=True)
                shutil.rmtree(folder / kept.key, ignore_errors=True)
        os.close(fd)
    if not dry_run:
        _sweep(folder)
    return removed


def _sweep(folder: Path) -> None:
    """Remove what installations that failed or were killed have left."""
    for path in folder.glob("*/"):
        # Python 3.10 gives files for this pattern, too.
        if (
            path.is_dir()
            and read_layer(folder, path.name) is None
            and (fd := locks.take(_lock(folder, path.name))) is not None
        ):
            # Again under the lock, for a build may have come to its end between the look above and the lock.
            if read_layer(folder, path.name) is None:
                shutil.rmtree(path, ignore_errors=True)
            os.close(fd)


def _lock(folder: Path, key: str) -> Path:
    return folder / f"{key}.lock"


def _used_at(folder: Path, key: str) -> float:
    try:
        return os.stat(_lock(folder, key)).st_mtime
    except OSError:
        return 0.0
