"""Upload of local files to a store: outputs of runs and files of users."""

from __future__ import annotations

import contextlib
import errno
import filecmp
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.data.stores import s3
from paceline.data.stores.failures import ShortError, cause_of
from paceline.data.stores.filesystem import Store, place_of
from paceline.data.stores.names import clean_path
from paceline.data.stores.record import StoreRecord
from paceline.data.transfer.listing import list_source
from paceline.data.transfer.progress import Meter, Progress, size_text
from paceline.errors import DataError, TransferError
from paceline.job.data_reference import DataReference, Source
from paceline.system.files import read_json, replacing, walk_files, write_json
from paceline.system.links import entries

_AT_ONCE = 8
_TRIES = 4
_FIRST_DELAY_S = 0.2
#: Beginning of the names of this process's unfinished files.
_MARK = f".paceline-{os.getpid()}-{secrets.token_hex(4)}"
#: The end of error messages that says how to allow overwriting, in Python and on the command line.
_OVERWRITE = "as_upload(overwrite=True) allows it, on the command line ',overwrite' behind the output's path."
READ_ONLY = {"http": "HTTP can only be read from", "memory": "it is the memory of one process, which no run shares"}


@dataclass(frozen=True, kw_only=True)
class Uploaded:
    """The result of an upload.

    Attributes:
        files, bytes: Number and total size of the uploaded files.
        skipped: Relative names of files that existed in the store and were not replaced.
        left_out: (name, type) of each entry of a run's output that was not stored, such as a socket.
    """

    name: str
    files: int
    bytes: int
    skipped: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()


def check_upload(reference: DataReference, workspace_dir: Path) -> None:
    """Check, before a run starts, that its output can be stored.

    Raises:
        DataError: The store is read-only, or files exist and the output may not overwrite them.
        TransferError: The store can't be reached, or refuses the credentials.
    """
    record, path = _target(reference, workspace_dir)
    if record.kind in READ_ONLY:
        raise DataError(
            f"output {reference.name!r} can't be stored in {record.title}: {READ_ONLY[record.kind]}. Name another datastore."
        )
    with Store(record) as store:
        if not reference.overwrite and (there := _existing(store, path)):
            raise DataError(
                f"output {reference.name!r} is to be stored at {path or '/'!r} in {store.title}, where there are {len(there)} "
                f"files already, such as {min(there)!r}. Name another path; {_OVERWRITE}"
            )
        # Use a random name, because other runs may test the same folder at the same time.
        probe = f"{path}/" * bool(path) + f".paceline-probe-{secrets.token_hex(4)}"
        with store.translating(f"writing to {path or '/'!r}"):
            _put_bytes(store, b"", probe)
            # Some stores allow writing but not removing. The empty file then stays, and the run may start.
            with contextlib.suppress(Exception):
                remove_file(store, probe)


def upload_output(
    reference: DataReference,
    run_dir: Path,
    *,
    workspace_dir: Path,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress | None = None,
    begun: Path | None = None,
) -> Uploaded:
    """Store a run's output, the files below `<run_dir>/uploads/<name>`.

    For a link to another file or folder of the run, Paceline stores the link's target. It does not store other links,
    pipes and sockets, but reports them through `say` and in the result (`left_out`).

    Args:
        reference: The output.
        run_dir: Folder of the run.
        workspace_dir: Folder of the workspace.
        say: Called with each message.
        progress: Called with the progress.
        begun: Path of a marker file, which is written before the first file is stored. If it exists already, an earlier
            call was killed, and this call keeps the files that the earlier call has stored. Only for local folders.

    Raises:
        DataError: Existing files may not be replaced, or the store can't hold a file's name.
        TransferError: The store can't be written.
    """
    record, path = _target(reference, workspace_dir)
    files, left_out = output_files(reference, run_dir)
    for name, why in left_out:
        say(left_out_text(reference, name, why))
    size = sum(file.stat().st_size for _, file in files)
    with Store(record) as store:
        own = set() if begun is None else _stored_before(store, path, files, begun)
        if not reference.overwrite and (both := (_existing(store, path) & {name for name, _ in files}) - own):
            raise DataError(
                f"output {reference.name!r}: {len(both)} files are there already at {path or '/'!r} in {store.title}, such as "
                f"{min(both)!r}; they were not replaced. The output stays in {str(run_dir / 'uploads' / reference.name)!r}; "
                f"{_OVERWRITE}"
            )
        if begun is not None:
            # Write the marker before any file, so that a later attempt can tell a killed upload's files from other files.
            write_json(begun, {"mark": _MARK}, sync=True)
        put_files(store, path, [(name, file) for name, file in files if name not in own], progress, are_plain=True)
    say(
        f"output {reference.name!r}: {len(files)} files, {size_text(size)}, stored at {path or '/'!r} in {record.title}"
    )
    return Uploaded(name=reference.name, files=len(files), bytes=size, left_out=tuple(left_out))


def output_files(reference: DataReference, run_dir: Path) -> tuple[list[tuple[str, Path]], list[tuple[str, str]]]:
    """List the files of a run's output, and the excluded entries.

    Returns:
        Sorted (relative name, path without links) of each file, and (name, type) of each excluded entry.

    Raises:
        DataError: A name is not valid text.
    """
    start, top = f"uploads/{reference.name}", Path(os.path.realpath(run_dir))
    files, left_out = [], []
    for entry in entries(os.fspath(run_dir), start, follow=True):
        name = entry.name[len(start) + 1 :] or "."
        _check_text(name)
        if entry.kind == "file":
            files.append((name, top / entry.real))
        elif entry.kind == "left":
            left_out.append((name, entry.why))
    return sorted(files), sorted(left_out)


def left_out_text(reference: DataReference, name: str, why: str) -> str:
    """Return a message: the output excludes the entry `name`. why: such as "a socket"."""
    return f"output {reference.name!r}: {name!r} is {why}, and is left out"


def files_below(folder: Path) -> list[tuple[str, Path]]:
    """Return sorted (relative name, file) pairs of a user's folder, following links.

    Raises:
        DataError: The folder does not exist, or a name is not valid text.
    """
    if not folder.is_dir():
        raise DataError(f"{str(folder)!r} is not a folder. Give the folder to upload.")
    files = sorted((name, Path(entry.path)) for name, entry, is_file in walk_files(folder) if is_file)
    for name, _ in files:
        _check_text(name)
    return files


def put_files(
    store: Store,
    path: str,
    files: Sequence[tuple[str, Path]],
    progress: Progress | None = None,
    *,
    are_plain: bool = False,
    by_content: bool = False,
) -> int:
    """Store files below a path of the store, and return their total size.

    Args:
        store: The opened store.
        path: Folder in the store.
        files: (relative name, file) pairs.
        progress: Called with the progress.
        are_plain: Refuse a file whose path contains a link, which a process of the run may have planted.
        by_content: The names are hashes of the contents. So an interrupted S3 upload of a large file can resume.

    Raises:
        DataError: The store is read-only.
        TransferError: The upload of a file failed, and the other uploads were cancelled.
    """
    if store.kind == "http":
        raise DataError(f"nothing can be stored in {store.title}: {READ_ONLY['http']}. Name another datastore.")
    sizes = [os.stat(file).st_size for _, file in files]
    meter, stop = Meter(progress, sum(sizes), len(files)), threading.Event()
    base = clean_path(path, store.title).rstrip("/")
    with store.translating("opening it"):
        # Open the file system (`store.fs`) once here, because otherwise each thread would open it.
        if store.kind != "local":
            assert store.fs is not None

    def put(item: tuple[str, Path]) -> None:
        name, file = item
        if not stop.is_set():
            try:
                # Check as late as possible: a process left behind by the script may have planted a link.
                if are_plain and os.path.realpath(file) != os.fspath(file):
                    raise TransferError(f"{name!r} was a file of the run, and is a link now; it was not stored.")
                _put_again(store, file, f"{base}/{name}" if base else name, stop, by_content)
            except BaseException:
                stop.set()
                raise
            meter.add(os.stat(file).st_size, files=1)

    # One connection serves an SFTP store, and its library mixes up writes of several threads.
    with ThreadPoolExecutor(1 if store.kind == "sftp" else _AT_ONCE, thread_name_prefix="paceline-store") as pool:
        try:
            for done in [pool.submit(put, item) for item in files]:
                done.result()
        except BaseException:
            # On any exception, even Ctrl-C, start no further upload and stop the running ones.
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    meter.finish()
    return sum(sizes)


def put_new(store: Store, data: bytes, path: str) -> bool:
    """Store a small file. Return False if the path exists already.

    On local folders, GCS, Azure, and S3 with conditional writes, this is atomic: of two concurrent calls, one returns False.

    Raises:
        DataError: The store is read-only.
        TransferError: The store can't be written.
    """
    if store.kind == "http":
        raise DataError(f"nothing can be stored in {store.title}: {READ_ONLY['http']}. Name another datastore.")
    with store.translating(f"writing {path!r}"):
        if store.kind == "local":
            return _put_new_here(data, store.local(path))
        if store.kind in ("s3", "gcs", "azure"):
            try:
                store.fs.pipe_file(store.full(path), data, mode="create")
                return True
            except FileExistsError:
                return False
            except (TypeError, NotImplementedError):
                pass  # this library or server does not support conditional writes
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    raise
        if store.fs.exists(store.full(path)):
            return False
        _put_bytes(store, data, path)
        return True


def _put_new_here(data: bytes, target: Path) -> bool:
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f"{_MARK}-{secrets.token_hex(4)}")
    try:
        beside.write_bytes(data)
        os.link(beside, target)  # unlike a rename, a link never replaces a file
        return True
    except FileExistsError:
        return False
    finally:
        beside.unlink(missing_ok=True)


def read_bytes(store: Store, path: str) -> bytes | None:
    """Return the content of a small file, None if it does not exist.

    Raises:
        TransferError: The store can't be read.
    """
    with store.translating(f"reading {path!r}"):
        try:
            return (
                store.local(path).read_bytes() if store.kind == "local" else bytes(store.fs.cat_file(store.full(path)))
            )
        except (FileNotFoundError, NotADirectoryError):
            return None


def remove_file(store: Store, path: str) -> None:
    """Remove a file of the store. Call this within a `store.translating` block."""
    if store.kind == "local":
        store.local(path).unlink()
    else:
        store.fs.rm_file(store.full(path))


def _target(reference: DataReference, workspace_dir: Path) -> tuple[StoreRecord, str]:
    record, path = place_of(reference.sources[0], workspace_dir)
    return record, clean_path(path, record.title).rstrip("/")


def _existing(store: Store, path: str) -> set[str]:
    try:
        return {
            info.relative for info in list_source(store, Source(datastore=store.record.name or "", path=path), path)
        }
    except DataError:
        return set()


def _stored_before(store: Store, path: str, files: Sequence[tuple[str, Path]], begun: Path) -> set[str]:
    """Return which of `files` a killed upload has stored. Remove its partial files."""
    journal = read_json(begun)
    if journal is None:
        return set()
    names = set()
    for name, file in files:
        target = store.local(f"{path}/{name}")
        for half in target.parent.glob(f"{journal['mark']}-*"):
            half.unlink(missing_ok=True)
        # Compare the bytes, because the uploaded copy has a different modification time.
        if target.is_file() and filecmp.cmp(file, target, shallow=False):
            names.add(name)
    return names


def _check_text(name: str) -> None:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"the file name {name!r} is not UTF-8, which stores require. Rename the file.") from None


def _put_again(store: Store, file: Path, path: str, stop: threading.Event, by_content: bool) -> None:
    with store.translating(f"writing {path!r}"):
        for number in range(_TRIES):
            try:
                _put_file(store, file, path, stop if by_content else None)
                return
            except Exception as error:
                if cause_of(error) == "disk":
                    raise TransferError(
                        f"writing {path!r} in {store.title} failed: no space is left there. Make room."
                    ) from error
                if cause_of(error) != "transient" or number == _TRIES - 1 or stop.is_set():
                    raise
                time.sleep(_FIRST_DELAY_S * 2**number)


def _put_file(store: Store, file: Path, path: str, by_content: threading.Event | None) -> None:
    size = os.stat(file).st_size
    if store.kind == "local":
        target = store.local(path)
        with _beside(target) as beside:
            shutil.copyfile(file, beside)
            if os.stat(beside).st_size != size:
                raise ShortError(f"{str(file)!r} changed while it was stored")
        return
    full = store.full(path)
    if store.kind == "sftp":
        _put_sftp(store.fs, file, full)
    elif store.kind == "s3" and by_content is not None and s3.is_multipart(size):
        s3.put_multipart(store.fs, file, full, by_content)
    else:
        store.fs.put_file(str(file), full)
    # Compare the size: a store may have accepted fewer bytes without an error.
    info = store.fs.info(full)
    if int(info.get("size") or 0) != size:
        raise ShortError(f"{path!r} has {info.get('size')} bytes there, not {size}")


def _put_sftp(fs: Any, file: Path, full: str) -> None:
    folder, _, name = full.rpartition("/")
    fs.makedirs(folder or "/", exist_ok=True)
    # Use only the beginning of the name, because the whole name may have the 255 bytes that a server allows already.
    beside = f"{folder}/.{name[:200]}.{secrets.token_hex(4)}"
    try:
        fs.ftp.put(str(file), beside)
        # `posix_rename` replaces an existing file. SFTP's own rename fails if the file exists.
        fs.ftp.posix_rename(beside, full)
    except BaseException:
        with contextlib.suppress(Exception):
            fs.ftp.remove(beside)
        raise


def _put_bytes(store: Store, data: bytes, path: str) -> None:
    if store.kind == "local":
        with _beside(store.local(path)) as beside:
            beside.write_bytes(data)
        return
    full = store.full(path)
    if store.kind == "sftp":
        store.fs.makedirs(full.rpartition("/")[0] or "/", exist_ok=True)
    store.fs.pipe_file(full, data)


def _beside(target: Path) -> contextlib.AbstractContextManager[Path]:
    target.parent.mkdir(parents=True, exist_ok=True)
    return replacing(target, f"{_MARK}-")
