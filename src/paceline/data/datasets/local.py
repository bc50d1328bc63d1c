"""A dataset's files in a folder of this machine, for as long as they are read."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.data.datasets.sources import is_local
from paceline.errors import DataError
from paceline.job.data_reference import DataReference, Source


@dataclass(frozen=True)
class LocalFile:
    """relative: its path below the dataset's folder, with `/`."""

    relative: str
    path: Path


@contextlib.contextmanager
def local_files(sources: Sequence[Source], workspace_dir: Path) -> Iterator[list[LocalFile]]:
    """The files, sorted by relative path: where they lie if that is one place of this machine, else through the cache.

    Raises:
        DataError: a place that is not there. TransferError: a store can't be read.
    """
    if len(sources) == 1 and is_local(sources[0]):
        # Standard library alone: in a worker, the input's folder.
        yield _below(Path(sources[0].path))
        return
    from paceline.data.transfer.cache import DataCache
    from paceline.data.transfer.fetch import fetch

    cache, reader = DataCache(), f"dataset-{uuid.uuid4().hex}"
    with contextlib.ExitStack() as stack:
        # The last callback runs first, so the view is removed while it is still held.
        stack.callback(os.close, cache.hold_view(reader))
        stack.callback(cache.drop_views, reader)
        fetched = fetch(
            DataReference(name="dataset", sources=tuple(sources)),
            workspace_dir=workspace_dir,
            cache=cache,
            view_dir=cache.view_dir(reader, 0),
            node_rank=0,
            ranks=range(1),
            node_count=1,
            world_size=1,
        )
        yield _below(fetched.path)


def _below(top: Path) -> list[LocalFile]:
    if top.is_file():
        return [LocalFile(top.name, top)]
    if not top.is_dir():
        raise DataError(f"there is nothing at {str(top)!r}, where files of a dataset were to be.")
    found = []
    for folder, below, names in os.walk(top, followlinks=True):
        here = f"{os.path.realpath(folder)}/"
        # A link back into a folder above would never end.
        below[:] = [name for name in below if not here.startswith(f"{os.path.realpath(Path(folder, name))}/")]
        for path in (Path(folder, name) for name in names):
            if path.is_file():  # no socket, no link that leads nowhere
                found.append(LocalFile(path.relative_to(top).as_posix(), path))
    return sorted(found, key=lambda file: file.relative)
