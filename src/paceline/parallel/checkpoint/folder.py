"""The folder of a checkpoint, which is complete or absent, and the save that fills it.

    <parent>/<name>                       a complete checkpoint: a folder gets this name only by a rename
    <parent>/.<name>.former               the previous checkpoint, until the new checkpoint has its final name
    <parent>/.<name>.saving-<8 hex>       a folder under construction; the writing process has locked its file `lock`

A killed process may leave one of the last two folders. The next save removes a `.saving` folder. If `<name>` is
missing, Paceline loads `.former` in its place.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.checkpoint.api import BackgroundWrite, Camera, header_of, write_file, write_image
from paceline.checkpoint.files import DIR_VARIABLE, LOCKED_WITHIN_S
from paceline.parallel.checkpoint.parts import TensorPiece, encoded, part_name
from paceline.parallel.errors import CheckpointError, ParallelError
from paceline.parallel.mesh import World
from paceline.system.files import age_s, sync_file, sync_if_possible

_SAVING = re.compile(r"\..+\.saving-[0-9a-f]{8}\Z", re.DOTALL)
_STEP = re.compile(r"(?:step_(\d+)|\.step_(\d+)\.former)\Z")
_LOCK = "lock"

#: The file that is written last: a folder without it is no checkpoint.
RECORD = "paceline.pt"
#: End of rank 0's error message if another rank could not write its part of a checkpoint.
ANOTHERS = "could not write its part; its log says why."
#: Seconds between two checks by rank 0 whether the other ranks' parts are in the folder.
_LOOK_S = 0.05

#: The object that copies the state into shared memory, which a background writer reads. All saves reuse this memory.
camera = Camera()


def steps_dir() -> Path:
    """Return the folder of checkpoints from PACELINE_CHECKPOINT_DIR, or raise ParallelError."""
    named = os.environ.get(DIR_VARIABLE)
    if not named:
        raise ParallelError(
            f"save() and load() without a path use the folder that {DIR_VARIABLE} names, and it is not set: a run of Paceline "
            "sets it. Give a path, or set it."
        )
    return Path(named)


def step_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps, `<folder>/step_<step>`."""
    return folder / f"step_{step}"


def step_of(path: Path) -> int:
    """Return the step in a checkpoint folder's name, or -1 without one."""
    match = _STEP.match(path.name)
    return int(match[1] or match[2]) if match else -1


def newest(folder: Path) -> Path | None:
    """Return the path of the newest complete checkpoint, or None."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return None
    # A folder of this name is a checkpoint only if it has a record, which `find` checks.
    paths = (step_path(folder, step) for step in sorted(({step_of(Path(name)) for name in names} - {-1}), reverse=True))
    return next((path for path in paths if find(path) is not None), None)


def find(path: Path) -> Path | None:
    """Return the folder with the complete checkpoint of this path, or None.

    The folder is `path` itself, or `.<name>.former` if the rename of a new checkpoint is not finished.
    """
    candidates = (path, _former(path))
    return next((one for one in candidates if (one / RECORD).is_file() or (one / ".metadata").is_file()), None)


class Saving:
    """A checkpoint under construction in `folder`, which `commit` renames to `path`."""

    def __init__(self, path: Path) -> None:
        """Make this save's temporary folder, and remove the folders of killed saves.

        Raises:
            ParallelError: The path exists and is not a checkpoint.
            OSError: The folder cannot be made.
        """
        self.path = path
        # Accept an empty folder: the script may have made it for this checkpoint.
        if os.path.lexists(path) and find(path) != path and not (path.is_dir() and not os.listdir(path)):
            raise ParallelError(f"{str(path)!r} is there and is not a checkpoint. Give a path that is free.")
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent)
        self.folder = path.with_name(f".{path.name}.saving-{secrets.token_hex(4)}")
        self.folder.mkdir()
        self._lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def commit(self) -> None:
        """Rename the complete checkpoint folder to `path`, and remove the previous checkpoint."""
        # Sync before the rename: after a power failure a folder with the final name must have its files.
        sync_if_possible(self.folder)
        former = _former(self.path)
        # Move the former folder: a rename can't replace a folder with files. Until the second rename, `find` returns this folder.
        if find(self.path) == self.path:
            shutil.rmtree(former, ignore_errors=True)
            os.rename(self.path, former)
        elif os.path.lexists(self.path):
            self.path.rmdir()
        os.rename(self.folder, self.path)
        # Sync the parent folder, which makes the rename durable.
        sync_if_possible(self.path.parent)
        # Remove the lock after the rename, because another save removes a temporary folder that has no lock.
        (self.path / _LOCK).unlink()
        shutil.rmtree(former, ignore_errors=True)
        self._close()

    def abandon(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self._close()

    def _close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_leftovers(parent: Path) -> None:
    """Remove unfinished checkpoint folders that killed processes left in `parent`."""
    for name in os.listdir(parent):
        if not _SAVING.match(name):
            continue
        try:
            fd = os.open(parent / name / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            # Without a lock file, the saving process was killed early, or is about to create the lock.
            if age_s(parent / name) > LOCKED_WITHIN_S:
                shutil.rmtree(parent / name, ignore_errors=True)
            continue
        except OSError:
            continue
        try:
            # The writer holds this lock. The kernel releases it when the process ends.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(parent / name, ignore_errors=True)
        except OSError:
            pass
        finally:
            os.close(fd)


def _former(path: Path) -> Path:
    return path.with_name(f".{path.name}.former")


class Save:
    """The save of one rank. Rank 0 also completes the checkpoint.

    The ranks' background threads report to rank 0 by files: a part gets its name once it is complete, and the file
    `<part>.failed` reports a failure. Messages over a process group could mix with the training's messages.
    """

    def __init__(self, world: World, folder: Path, saving: Saving | None, record: bytes) -> None:
        self.rank, self._size = world.rank, world.size
        self._folder, self._saving, self._record = folder, saving, record
        self._path = folder / part_name(world.rank, world.size)
        self._writing: BackgroundWrite | None = None
        self._is_given_up = False

    def write(self, pieces: Sequence[TensorPiece]) -> None:
        """Write this rank's part and return when the file is complete."""
        state, arrays, metadata = encoded(pieces)
        self._explained(lambda moves: write_file(self._path, state, arrays, metadata), lambda: None)

    def finish(self) -> None:
        """Write the file `paceline.pt`, and rename the checkpoint's folder to its final path.

        Rank 0 calls this when the part files of all ranks are complete.
        """
        assert self._saving is not None
        path = self._folder / RECORD
        path.write_bytes(self._record)
        sync_file(path)
        self._saving.commit()

    def abandon(self) -> None:
        """Remove the unfinished checkpoint folder, on rank 0."""
        if self._saving is not None:
            self._saving.abandon()

    def start(self, pieces: Sequence[TensorPiece], step_s: float | None) -> None:
        """Write this rank's part in the background.

        Training may continue meanwhile. step_s: Seconds until training changes the tensors, or None if unknown.
        """
        state, arrays, metadata = encoded(pieces)
        image = camera.take(header_of(state, arrays, metadata), arrays, step_s)

        def work(moves: Callable[[], None]) -> None:
            try:
                image.wait()
                write_image(self._path, image.bytes(), moves)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._path.with_suffix(".failed").touch()
                raise
            finally:
                camera.give_back(image)
            if self._saving is not None:
                self._await_parts()
                self.finish()

        self._writing = BackgroundWrite(lambda moves: self._explained(work, moves))

    def settle(self, patience_s: float) -> bool:
        """Wait for the background write. Return False after `patience_s` without progress."""
        return self._writing is None or self._writing.settle(patience_s)

    def drop(self) -> None:
        """Give up the save: rank 0 no longer waits for other ranks' parts."""
        self._is_given_up = True

    def give_up(self) -> None:
        """Give up the save: wait for this rank's write, or else remove the folder."""
        self.drop()
        if self._writing is None:
            self.abandon()
        else:
            self._writing.join()

    @property
    def error(self) -> Exception | None:
        """The error of this rank's background write, or None."""
        return None if self._writing is None else self._writing.error

    def _await_parts(self) -> None:
        missing = {part_name(rank, self._size): rank for rank in range(self._size)}
        while missing:
            names = set(os.listdir(self._folder))
            missing = {name: rank for name, rank in missing.items() if name not in names}
            failed = [rank for name, rank in missing.items() if f"{name[: -len(_ENDING)]}.failed" in names]
            if failed or (missing and self._is_given_up):
                rank = failed[0] if failed else min(missing.values())
                raise CheckpointError(f"rank {rank} {ANOTHERS}")
            if missing:
                time.sleep(_LOOK_S)

    def _explained(self, work: Callable[[Callable[[], None]], None], moves: Callable[[], None]) -> None:
        try:
            work(moves)
        except (OSError, CheckpointError) as error:
            self.abandon()
            text = str(error) if isinstance(error, CheckpointError) else f"rank {self.rank}: {error.strerror or error}."
            raise CheckpointError(
                f"the checkpoint could not be written to {str(self._folder.parent)!r}: {text} Former checkpoints are untouched."
            ) from error


_ENDING = ".safetensors"


def reason(error: BaseException) -> str:
    """Describe a failure in one line: rank, error class and message."""
    failures = getattr(error, "failures", None)
    if not isinstance(failures, dict) or not failures:
        return f"{type(error).__name__}: {error}"
    rank, wrapped = min(failures.items())
    cause = wrapped[0] if isinstance(wrapped, tuple) else wrapped
    return f"rank {rank}: {type(cause).__name__}: {cause}"
