"""Files of this machine -> a store: what a run leaves, and what a user puts there by hand."""

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

from paceline.data.stores.failures import ShortError, cause_of
from paceline.data.stores.filesystem import Store, place_of
from paceline.data.stores.names import clean_path
from paceline.data.stores.record import StoreRecord
from paceline.data.transfer import multipart
from paceline.data.transfer.listing import list_source
from paceline.data.transfer.progress import Meter, Progress, size_text
from paceline.errors import DataError, TransferError
from paceline.job.data_reference import DataReference, Source
from paceline.system.files import read_json, replacing, walk_files, write_json
from paceline.system.links import entries

_AT_ONCE = 8
_TRIES = 4
_FIRST_DELAY_S = 0.2
#: With what the names of this process's unfinished files begin.
_MARK = f".paceline-{os.getpid()}-{secrets.token_hex(4)}"
#: How it is allowed to replace what is there: in Python, and in the words of the command line.
_OVERWRITE = "as_upload(overwrite=True) allows it, on the command line ',overwrite' behind the output's path."
READ_ONLY = {"http": "HTTP can only be read from", "memory": "it is the memory of one process, which no run shares"}


@dataclass(frozen=True, kw_only=True)
class Uploaded:
    """The result of an upload. files, bytes: of this upload. skipped: relative names that were there and stayed as they were.
    left_out: of a run's output, the names in it that are no files of the run, each with what it is instead.
    """

    name: str
    files: int
    bytes: int
    skipped: tuple[str, ...] = ()
    left_out: tuple[tuple[str, str], ...] = ()


def check_upload(reference: DataReference, workspace_dir: Path) -> None:
    """Refuse a place where the run's output can't be stored; a small file is written and removed again to see it.

    Raises:
        DataError: a store that can't be written, or files are there and the output may not overwrite.
        TransferError: it can't be reached, or refuses.
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
        # By chance, because other runs may try the same place at the same time.
        probe = f"{path}/" * bool(path) + f".paceline-probe-{secrets.token_hex(4)}"
        with store.telling(f"writing to {path or '/'!r}"):
            _put_bytes(store, b"", probe)
            # Some stores allow to write and not to remove. Then the empty file stays, and the run may begin.
            with contextlib.suppress(Exception):
                _remove(store, probe)


def upload_output(
    reference: DataReference,
    run_dir: Path,
    *,
    workspace_dir: Path,
    say: Callable[[str], None] = lambda text: None,
    progress: Progress | None = None,
    begun: Path | None = None,
) -> Uploaded:
    """Store all files of a run's output, which lie below `<run_dir>/uploads/<name>`, where the reference says.

    A link to another of the run's files or folders is stored as what it leads to. All other links, and pipes, sockets and
    the like, are left out: named to `say`, and in the result.
    begun: a file that is made once the first file may be stored. Where it is there, the same upload was killed: files that
        are there already, with the same content, are its own. It stays; for stores that are folders.

    Raises:
        DataError: files are there that may not be replaced, or a name that no store takes.
        TransferError: the store can't be written.
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
                f"{min(both)!r}; they were not replaced. The output lies in {str(run_dir / 'uploads' / reference.name)!r}; "
                f"{_OVERWRITE}"
            )
        if begun is not None:
            # On the disk before the first file is stored: else a killed upload's own files would be taken for somebody else's.
            write_json(begun, {"mark": _MARK}, sync=True)
        left = [(name, file) for name, file in files if name not in own]
        put_files(store, path, left, progress, are_plain=True)
    say(
        f"output {reference.name!r}: {len(files)} files, {size_text(size)}, stored at {path or '/'!r} in {record.title}"
    )
    return Uploaded(name=reference.name, files=len(files), bytes=size, left_out=tuple(left_out))


def output_files(reference: DataReference, run_dir: Path) -> tuple[list[tuple[str, Path]], list[tuple[str, str]]]:
    """((relative name, where it lies, by a way without links) of every file of a run's output, (name, what it is) of what
    is left out), both sorted.

    Raises:
        DataError: a name that is no text.
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
    """One line on a name in an output that is not stored."""
    return f"output {reference.name!r}: {name!r} is {why}, and is left out"


def files_below(folder: Path) -> list[tuple[str, Path]]:
    """(relative name, file) of every file of a folder of the user's, sorted. Links are followed.

    Raises:
        DataError: no folder, or a name that is no text.
    """
    if not folder.is_dir():
        raise DataError(f"{str(folder)!r} is no folder. Name the folder whose files are to be stored.")
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
    """Store (relative name, file) below a path; how many bytes. A file appears in the store when it is whole.

    are_plain: no link is on the way to any of them; one that has come there since is not followed.
    by_content: each name says what the file holds, so that an upload to S3 that broke off within a large file goes on there.

    Raises:
        DataError: the store can only be read.
        TransferError: the first file that can't be stored; the others are given up.
    """
    if store.kind == "http":
        raise DataError(f"nothing can be stored in {store.title}: {READ_ONLY['http']}. Name another datastore.")
    sizes = [os.stat(file).st_size for _, file in files]
    meter, stop = Meter(progress, sum(sizes), len(files)), threading.Event()
    base = clean_path(path, store.title).rstrip("/")
    with store.telling("opening it"):
        # Opened here, by one thread; each of those below would open it for itself.
        if store.kind != "local":
            assert store.fs is not None

    def put(item: tuple[str, Path]) -> None:
        name, file = item
        if not stop.is_set():
            try:
                # At the last moment, because a process that the script has left behind may have put a link there since.
                if are_plain and os.path.realpath(file) != os.fspath(file):
                    raise TransferError(f"{name!r} was a file of the run, and is a link now; it was not stored.")
                _put_again(store, file, f"{base}/{name}" if base else name, stop, by_content)
            except BaseException:
                stop.set()
                raise
            meter.add(os.stat(file).st_size, files=1)

    # One connection serves an SFTP store; its library mixes up what several threads write.
    with ThreadPoolExecutor(1 if store.kind == "sftp" else _AT_ONCE, thread_name_prefix="paceline-store") as pool:
        try:
            for done in [pool.submit(put, item) for item in files]:
                done.result()
        except BaseException:
            # Ctrl-C too: what waits is not begun, what is under way is given up.
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    meter.finish()
    return sum(sizes)


def put_new(store: Store, data: bytes, path: str) -> bool:
    """Store a small file unless there is one of this name; False then. Of two at once on S3 or a local folder, one is told.

    Raises:
        DataError: the store can only be read.
        TransferError: it can't be written.
    """
    if store.kind == "http":
        raise DataError(f"nothing can be stored in {store.title}: {READ_ONLY['http']}. Name another datastore.")
    with store.telling(f"writing {path!r}"):
        if store.kind == "local":
            return _put_new_here(data, store.local(path))
        if store.kind == "s3":
            try:
                store.fs.pipe_file(store.full(path), data, mode="create")
                return True
            except FileExistsError:
                return False
            except (TypeError, NotImplementedError):
                pass  # an s3fs or a server that knows no such condition
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
        os.link(beside, target)  # which fails where there is one; a rename would replace it
        return True
    except FileExistsError:
        return False
    finally:
        beside.unlink(missing_ok=True)


def read_bytes(store: Store, path: str) -> bytes | None:
    """A small file; None where there is none.

    Raises:
        TransferError: the store can't be read.
    """
    with store.telling(f"reading {path!r}"):
        try:
            return (
                store.local(path).read_bytes() if store.kind == "local" else bytes(store.fs.cat_file(store.full(path)))
            )
        except (FileNotFoundError, NotADirectoryError):
            return None


def _target(reference: DataReference, workspace_dir: Path) -> tuple[StoreRecord, str]:
    record, path = place_of(reference.sources[0], workspace_dir)
    return record, clean_path(path, record.title).rstrip("/")


def _existing(store: Store, path: str) -> set[str]:
    """Relative names of the files that are at this path."""
    try:
        return {
            info.relative for info in list_source(store, Source(datastore=store.record.name or "", path=path), path)
        }
    except DataError:
        return set()


def _stored_before(store: Store, path: str, files: Sequence[tuple[str, Path]], begun: Path) -> set[str]:
    """The names that an upload had stored before it was killed; the files that it had not finished go."""
    told = read_json(begun)
    if told is None:
        return set()
    names = set()
    for name, file in files:
        target = store.local(f"{path}/{name}")
        for half in target.parent.glob(f"{told['mark']}-*"):
            half.unlink(missing_ok=True)
        # Byte by byte, for the copy has a time of its own.
        if target.is_file() and filecmp.cmp(file, target, shallow=False):
            names.add(name)
    return names


def _check_text(name: str) -> None:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"the file name {name!r} is no UTF-8, which no store takes. Rename the file.") from None


def _put_again(store: Store, file: Path, path: str, stop: threading.Event, by_content: bool) -> None:
    with store.telling(f"writing {path!r}"):
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
    """by_content: as for `put_files`, with what tells that the upload is given up."""
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
    elif store.kind == "s3" and by_content is not None and multipart.is_large(size):
        multipart.put(store.fs, file, full, by_content)
    else:
        store.fs.put_file(str(file), full)
    # A store may have taken less than was sent, without an error.
    found = store.fs.info(full)
    if int(found.get("size") or 0) != size:
        raise ShortError(f"{path!r} has {found.get('size')} bytes there, not {size}")


def _put_sftp(fs: Any, file: Path, full: str) -> None:
    folder, _, name = full.rpartition("/")
    fs.makedirs(folder or "/", exist_ok=True)
    # Not the whole name, which may have all the 255 bytes that a server takes.
    beside = f"{folder}/.{name[:200]}.{secrets.token_hex(4)}"
    try:
        fs.ftp.put(str(file), beside)
        # This one replaces what is there; SFTP's own rename refuses to.
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


def _remove(store: Store, path: str) -> None:
    if store.kind == "local":
        store.local(path).unlink()
    else:
        store.fs.rm_file(store.full(path))


def _beside(target: Path) -> contextlib.AbstractContextManager[Path]:
    """A name beside the target to write to, in a folder that is made if need be."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return replacing(target, f"{_MARK}-")
