"""The files of checkpoints, each complete or absent.

    checkpoint_200.safetensors                              the whole state, written by rank 0
    checkpoint_200.part_1_of_4.3f9a01c2.safetensors         rank 1's part of four; all four have the same token `3f9a01c2`
    .checkpoint_200.safetensors.saving-<8 hex>              a file under construction, locked by its writer

A file is renamed to its final name once its bytes are on the disk. A killed process leaves its file under construction,
which the next save removes. A checkpoint in parts is complete when all its parts exist. There is no separate mark of
completeness, so ranks may write their parts in any order and on different nodes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint import values
from paceline.errors import CheckpointError, UserError
from paceline.system import safetensors
from paceline.system.files import sync_if_possible

_NAME = re.compile(r"checkpoint_(\d+)(?:\.part_(\d+)_of_(\d+)\.(\w+))?\.safetensors")
_SAVING = re.compile(r"\..+\.safetensors\.saving-[0-9a-f]{8}")
#: A writer locks its new file within this many seconds. If an older file has no lock, its writer was killed.
LOCKED_WITHIN_S = 10.0
#: Sizes in bytes: data of one write, blocks that O_DIRECT (no page cache) requires, smallest file that is written by O_DIRECT.
_PIECE, _BLOCK, _LEAST_DIRECT = 8 << 20, 4096, 64 << 20
#: Key in the metadata of a safetensors header. The key's value is the state as JSON, without arrays.
_STATE = "paceline.state"

#: Environment variable with the path of a run's checkpoint folder. Paceline sets the variable for every worker.
DIR_VARIABLE = "PACELINE_CHECKPOINT_DIR"
#: Default checkpoint folder outside of a run, relative to the working directory.
_DEFAULT = "checkpoints"


def folder_of(folder: str | os.PathLike[str] | None) -> Path:
    """Return the checkpoint folder: `folder`, else $PACELINE_CHECKPOINT_DIR, else `./checkpoints`.

    Raises:
        UserError: The path is a URL, or a file.
    """
    named = os.fspath(folder) if folder is not None else os.environ.get(DIR_VARIABLE) or _DEFAULT
    if "://" in named:
        raise UserError(
            f"folder={named!r} is an address. Checkpoints need a folder: in a run Paceline copies them to the "
            "workspace, and to the nodes of the next attempt. Omit folder=, or mount the store."
        )
    place = Path(named).absolute()
    if place.exists() and not place.is_dir():
        raise UserError(f"folder={named!r} is a file. Name a folder; save() creates it if necessary.")
    return place


@dataclass(frozen=True)
class CheckpointPart:
    """A checkpoint file: the whole state, or one rank's part.

    Attributes:
        of: The number of parts of the checkpoint; 1 for a whole state, which rank 0 has saved.
        token: A text that all parts of one checkpoint share; "" for a whole state.
    """

    step: int
    rank: int = 0
    of: int = 1
    token: str = ""

    @property
    def name(self) -> str:
        middle = f".part_{self.rank}_of_{self.of}.{self.token}" if self.token else ""
        return f"checkpoint_{self.step}{middle}.safetensors"


def parts_in(folder: Path) -> list[CheckpointPart]:
    """Return all checkpoint files in the folder, even parts of incomplete checkpoints."""
    try:
        names = set(os.listdir(folder))
    except FileNotFoundError:
        return []
    fields = [match.groups() for name in names if (match := _NAME.fullmatch(name))]
    found = [CheckpointPart(int(step), int(rank or 0), int(of or 1), token or "") for step, rank, of, token in fields]
    # Ignore names that `save` does not write, such as one with a step of "007", or with rank 7 of 2.
    return [part for part in found if part.rank < part.of and part.name in names]


def whole(parts: Sequence[CheckpointPart]) -> dict[int, list[CheckpointPart]]:
    """Return a dict that maps each complete checkpoint's step to its parts.

    The parts are sorted by rank. If a step has several complete checkpoints, use the checkpoint with the fewest parts.
    """
    together: dict[tuple[int, int, str], list[CheckpointPart]] = {}
    for part in parts:
        together.setdefault((part.step, -part.of, part.token), []).append(part)
    # The sort puts the checkpoint with the fewest parts last for each step. A dict keeps the last value of each key.
    return {
        step: sorted(members, key=lambda part: part.rank)
        for (step, of, _), members in sorted(together.items())
        if len(members) == -of
    }


def header_of(state: object, dense: Sequence[values.DenseArray], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of a checkpoint file that precede its arrays."""
    about = [(array.name, array.dtype, array.shape, array.size) for array in dense]
    return safetensors.header(about, {_STATE: json.dumps(state), "format": "pt", **(metadata or {})})


def write_file(
    path: Path,
    state: object,
    dense: Sequence[values.DenseArray],
    metadata: Mapping[str, str] | None = None,
    *,
    durable: bool = True,
) -> None:
    """Write a checkpoint file so that it is either complete or absent.

    With `durable`, the function returns only when the file is on the disk. Otherwise a power failure may lose the file.

    Raises:
        OSError: The write failed. A previous file of that name is untouched.
    """
    header = header_of(state, dense, metadata)
    with _replacing(path, durable=durable) as fd:
        for data in (memoryview(header), *(array.data for array in dense)):
            _write_all(fd, data, None, lambda: None)


def write_image(path: Path, data: memoryview, moves: Callable[[], None]) -> None:
    """Write a checkpoint file from memory so that it is complete or absent.

    Large files bypass the page cache if the file system allows it. `moves` is called after each written piece.

    Raises:
        OSError: The write failed. A previous file of that name is untouched.
    """
    with _replacing(path, durable=True) as fd:
        is_direct = len(data) >= _LEAST_DIRECT
        if is_direct:
            try:
                fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
            except OSError:
                is_direct = False
        # O_DIRECT writes only whole blocks, so write the rest of the data through the page cache.
        whole_blocks = len(data) // _BLOCK * _BLOCK if is_direct else 0
        try:
            _write_all(fd, data[:whole_blocks], 0, moves)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            whole_blocks = 0  # this file system accepts the flag O_DIRECT, but refuses writes with it
        if is_direct:
            fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        _write_all(fd, data[whole_blocks:], whole_blocks, moves)


def _write_all(fd: int, data: memoryview, offset: int | None, moves: Callable[[], None]) -> None:
    done = 0
    while done < len(data):
        piece = data[done : done + _PIECE]
        done += os.write(fd, piece) if offset is None else os.pwrite(fd, piece, offset + done)
        moves()


@contextlib.contextmanager
def _replacing(path: Path, *, durable: bool) -> Iterator[int]:
    beside = path.with_name(f".{path.name}.saving-{secrets.token_hex(4)}")
    try:
        with open(beside, "xb", buffering=0) as file:
            # The lock shows other processes that the writer is alive. The kernel releases the lock when this process ends.
            with contextlib.suppress(OSError):  # some file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            yield file.fileno()
            if durable:
                os.fsync(file.fileno())
            os.rename(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise
    if durable:
        sync_if_possible(path.parent)


class CheckpointFile:
    """A checkpoint file that reads its arrays only on request.

    Attributes:
        state: The state as JSON, in which names of arrays replace the arrays.

    Raises:
        CheckpointError: The file is not a checkpoint.
    """

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        """Read a checkpoint file's header. `folder` names the checkpoint in error messages."""
        self.path = path
        self._folder = folder
        try:
            with open(path, "rb") as file:
                self._entries, metadata, self._start, size = safetensors.read_header(file)
            self.state = json.loads(metadata[_STATE])
            #: Size of the checkpoint in bytes. A memory file (memfd) may be longer, because later checkpoints reuse it.
            self.size = self._start
            for name, entry in self._entries.items():
                begin, end = entry["data_offsets"]
                self.size = max(self.size, self._start + end)
                if not 0 <= begin <= end <= size:
                    raise ValueError(f"{name!r} has the bytes {begin} to {end} of {size}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(self._unreadable(f"{type(error).__name__}: {error}")) from error

    def array(self, name: str, of: values.Library) -> object:
        """Read the checkpoint's array `name` as an array of library `of`, "torch" or "numpy"."""
        entry = self._entries[name]
        begin, end = entry["data_offsets"]
        data = bytearray(end - begin)
        with open(self.path, "rb") as file:
            file.seek(self._start + begin)
            if not safetensors.fill(file, memoryview(data)):
                raise CheckpointError(self._unreadable("it ends in the middle of an array"))
        return values.made(entry["dtype"], entry["shape"], data, of=of)

    def _unreadable(self, why: str) -> str:
        return (
            unreadable(self.path, why) if self._folder is None else unreadable(self._folder, f"{self.path.name}: {why}")
        )


def unreadable(path: Path, why: str) -> str:
    return f"the checkpoint {str(path)!r} can't be read: {why}. Remove it to go on from the one before."


def remove_old(folder: Path, keep: int, rank: int, size: int, but: CheckpointPart | None = None) -> None:
    """Remove this rank's old checkpoint files, except the newest `keep` checkpoints and the file `but`.

    If each rank has a separate folder, no folder has all parts of a checkpoint. In this case the newest `keep` + 2
    parts of this rank stay, because another rank may be two saves behind.
    """
    parts = parts_in(folder)
    complete = sorted(whole(parts), reverse=True)
    own = sorted({part.step for part in parts if part.rank == rank and part.of > 1}, reverse=True)
    limits = complete[keep - 1 : keep]
    if not set(own).intersection(complete[:1]):
        limits += own[keep + 1 : keep + 2]
    oldest = max(limits, default=-1)
    for part in (part for part in parts if part.step < oldest and part.rank % size == rank and part != but):
        with contextlib.suppress(OSError):
            (folder / part.name).unlink()


def remove_leftovers(folder: Path) -> None:
    """Remove unfinished checkpoint files that killed processes left."""
    with contextlib.suppress(OSError):
        for name in filter(_SAVING.fullmatch, os.listdir(folder)):
            with contextlib.suppress(OSError), open(folder / name, "r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # Keep a new empty file: a live writer may have just created the file, and may not have locked it yet.
                about = os.fstat(file.fileno())
                if about.st_size or time.time() - about.st_mtime > LOCKED_WITHIN_S:
                    (folder / name).unlink()
