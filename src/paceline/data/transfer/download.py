"""Files of a store -> a folder that the user names; not through the cache."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from paceline.data.stores.filesystem import Store
from paceline.data.stores.names import check_relative, check_tree
from paceline.data.transfer.listing import FileInfo, path_in_store
from paceline.data.transfer.partial import FileToFetch, Partial
from paceline.data.transfer.progress import Meter, Progress
from paceline.data.transfer.transfer import transfer
from paceline.errors import TransferError


def download_files(
    store: Store, infos: Sequence[FileInfo], target: Path, *, overwrite: bool, progress: Progress | None
) -> int:
    """Copy files to `target`, under their paths in the store; returns how many.

    Each grows under a name of its own beside its place, so another try goes on with it.

    Raises:
        DataError: names that can't lie in a folder. TransferError: no room, or a file that can't be read.
    """
    names = {path_in_store(info): info for info in infos}
    for name in names:
        check_relative(name, store.title)
    check_tree(names, store.title)
    wanted = [(name, info) for name, info in names.items() if overwrite or not (target / name).exists()]
    meter = Meter(progress, sum(max(info.size, 0) for _, info in wanted), len(wanted))
    try:
        target.mkdir(parents=True, exist_ok=True)
        # Without links, to compare with: a link inside the folder may lead anywhere.
        top = os.path.realpath(target)
        for name, _ in wanted:
            folder = (target / name).parent
            folder.mkdir(parents=True, exist_ok=True)
            if not f"{os.path.realpath(folder)}/".startswith(f"{top.rstrip('/')}/"):
                raise TransferError(
                    f"{name!r} of {store.title} would be written outside {str(target)!r}, because {str(folder)!r} is a link "
                    "that leads out of it. Remove the link, or name another folder."
                )
    except OSError as error:
        raise TransferError(f"{str(error.filename or target)!r} can't be made: {error.strerror}. Mend that.") from error
    # As other programs of the user make files. Until it is whole, a file is the user's alone.
    mode = 0o666 & ~_umask()
    transfer(store, [_job(target / name, name, info, mode) for name, info in wanted], meter)
    meter.finish()
    return len(wanted)


def _job(target: Path, name: str, info: FileInfo, mode: int) -> FileToFetch:
    # Of this version: what came of another one is no beginning of this.
    sign = hashlib.sha256(f"{target.name}\0{info.size}\0{info.version}".encode("utf-8", "surrogateescape")).hexdigest()[
        :32
    ]

    def place(partial: Partial) -> None:
        partial.finish(target, mode=mode, mtime_ns=None)

    part = target.with_name(f".paceline-{sign}.part")
    return FileToFetch(path=name, size=info.size, version=info.version, part=part, place=place, is_there=lambda: False)


def _umask() -> int:
    # No call only reads the mask. For this moment other threads make files that are more private than asked for, never less.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
