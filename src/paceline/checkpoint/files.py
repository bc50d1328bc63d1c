"""The files of checkpoints, each whole or absent.

    checkpoint_200.safetensors                              rank 0's, which has all of the state
    checkpoint_200.part_1_of_4.3f9a01c2.safetensors         rank 1's part of four; the last word is the same on all four
    .checkpoint_200.safetensors.saving-<8 hex>              one that is being written: locked as long as somebody writes

A file gets its name by a rename, once its bytes are on the disk. A process that is killed leaves one of the third kind, which the
next save removes. Parts need no last word from anybody: a checkpoint is whole when all of its parts are there, in
whatever order, on however many nodes they were written, and also while they are on their way to another folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.checkpoint import values
from paceline.errors import CheckpointError, UserError
from paceline.system import safetensors

_NAME = re.compile(r"checkpoint_(\d+)(?:\.part_(\d+)_of_(\d+)\.(\w+))?\.safetensors")
_SAVING = re.compile(r"\..+\.safetensors\.saving-[0-9a-f]{8}")
#: A writer has its lock within so long after it has made the file.
LOCKED_WITHIN_S = 10.0
#: In the format's free part: what a state has beside its arrays.
_STATE = "paceline.state"


#: Set for each worker of a run; handed to every attempt.
DIR_VARIABLE = "PACELINE_CHECKPOINT_DIR"
#: Elsewhere: below the working directory.
_DEFAULT = "checkpoints"


def folder_of(folder: str | os.PathLike[str] | None) -> Path:
    """The folder of the checkpoints: the one that is given, the run's, or `./checkpoints` outside of any run.

    Raises:
        UserError: an address, or a file.
    """
    named = os.fspath(folder) if folder is not None else os.environ.get(DIR_VARIABLE) or _DEFAULT
    if "://" in named:
        raise UserError(
            f"folder={named!r} is an address. Checkpoints are written to a folder; in a run they are brought to the "
            "workspace, and to the nodes of the next attempt, by themselves. Leave folder= out, or mount the store."
        )
    place = Path(named).absolute()
    if place.exists() and not place.is_dir():
        raise UserError(f"folder={named!r} is a file. Name a folder, which save() makes where there is none.")
    return place


@dataclass(frozen=True)
class CheckpointPart:
    """A file of a checkpoint. of: the number of its parts, 1 where rank 0 has saved all; token: the same on all of them."""

    step: int
    rank: int = 0
    of: int = 1
    token: str = ""

    @property
    def name(self) -> str:
        middle = f".part_{self.rank}_of_{self.of}.{self.token}" if self.token else ""
        return f"checkpoint_{self.step}{middle}.safetensors"


def parts_in(folder: Path) -> list[CheckpointPart]:
    """All files of checkpoints in the folder, those of checkpoints that are not whole too."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    found = [(int(m[1]), m) for name in names if (m := _NAME.fullmatch(name))]
    return [CheckpointPart(step, int(m[2]), int(m[3]), m[4]) if m[2] else CheckpointPart(step) for step, m in found]


def whole(parts: Sequence[CheckpointPart]) -> dict[int, list[CheckpointPart]]:
    """Step -> the parts of a checkpoint of it that is whole, by rank. Of several, the one of the fewest parts."""
    together: dict[tuple[int, int, str], list[CheckpointPart]] = {}
    for part in parts:
        together.setdefault((part.step, -part.of, part.token), []).append(part)
    found: dict[int, list[CheckpointPart]] = {}
    # In this order the later one of a step has fewer parts.
    for (step, of, _), members in sorted(together.items()):
        if len(members) == -of:
            found[step] = sorted(members, key=lambda part: part.rank)
    return found


def write(folder: Path, part: CheckpointPart, told: Any, dense: Sequence[values.DenseArray]) -> None:
    """Write one file of a checkpoint, and return once it is on the disk under its name.

    Raises:
        OSError: it can't be written; what had the name before is there still.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / part.name, told, dense)


def write_file(path: Path, told: Any, dense: Sequence[values.DenseArray], *, durable: bool = True) -> None:
    """Write a file, which has its name once it is whole. durable: return once it is on the disk; else a power cut may lose it.

    Raises:
        OSError: it can't be written; what had the name before is there still.
    """
    about = [(one.name, one.dtype, one.shape, one.size) for one in dense]
    header = safetensors.header(about, {_STATE: json.dumps(told), "format": "pt"})
    beside = path.with_name(f".{path.name}.saving-{secrets.token_hex(4)}")
    try:
        with open(beside, "xb") as file:
            # Held while somebody writes, and let go by the kernel however the process ends.
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(header)
            for one in dense:
                file.write(one.data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
            os.rename(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    if durable:
        sync_folder(path.parent)


class CheckpointFile:
    """One file, of which nothing is read but its header until something is asked for.

    Raises:
        CheckpointError: it is no file of a checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                header, self._start, size = safetensors.read_header(file)
            self.told = json.loads(header.pop("__metadata__")[_STATE])
            self._entries: Mapping[str, Any] = header
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                if not 0 <= begin <= end <= size:
                    raise ValueError(f"{name!r} would lie at {begin} to {end} of {size} bytes")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(unreadable(path, f"{type(error).__name__}: {error}")) from error

    def array(self, name: str, of: str) -> Any:
        """A tensor of torch or an array of numpy, read now."""
        entry = self._entries[name]
        begin, end = entry["data_offsets"]
        data = bytearray(end - begin)
        with open(self.path, "rb") as file:
            file.seek(self._start + begin)
            if not safetensors.fill(file, memoryview(data)):
                raise CheckpointError(unreadable(self.path, "it ends in the middle of an array"))
        return values.made(entry["dtype"], entry["shape"], data, of=of)


def unreadable(path: Path, why: str) -> str:
    """The message about a file."""
    return f"the checkpoint {str(path)!r} can't be read: {why}. Remove this file to go on from the one before."


def remove_old(folder: Path, keep: int, rank: int, size: int, but: CheckpointPart | None = None) -> None:
    """Remove what is older than the last `keep` whole checkpoints, as far as it is this rank's to remove, and not `but`.

    Where the ranks' folders are not one, no checkpoint of parts is whole here. Then so many of this rank's own stay, and two
    more: a rank may be two saves behind the others, and what it has not written yet makes none whole.
    """
    parts = parts_in(folder)
    complete = sorted(whole(parts), reverse=True)
    own = sorted({part.step for part in parts if part.rank == rank and part.of > 1}, reverse=True)
    oldest = complete[keep - 1] if len(complete) >= keep else None
    if own and not any(step in own for step in complete[:1]) and len(own) >= keep + 2:
        oldest = max(oldest or 0, own[keep + 1])
    for part in parts:
        if oldest is not None and part.step < oldest and part.rank % size == rank and part != but:
            with contextlib.suppress(OSError):
                (folder / part.name).unlink()


def remove_leftovers(folder: Path) -> None:
    """Remove what killed saves have left; what somebody still writes stays."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if not _SAVING.fullmatch(name):
                continue
            with contextlib.suppress(OSError), open(folder / name, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A writer has its lock a moment after the file is there; an empty one may be just about to be locked.
                about = os.fstat(file.fileno())
                if about.st_size or time.time() - about.st_mtime > LOCKED_WITHIN_S:
                    (folder / name).unlink()


def sync_file(path: Path) -> None:
    """Return once the file's content is on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(folder: Path) -> None:
    """Return once the names in the folder are on the disk."""
    # Some file systems refuse to sync a folder, such as some network ones.
    with contextlib.suppress(OSError):
        sync_file(folder)
