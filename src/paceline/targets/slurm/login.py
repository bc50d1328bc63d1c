"""A run's folder on the far side of a login host: put there when the run is submitted, mirrored back when it is looked at.

    here     <workspace>/runs/<run id>         what readers see: a copy, run.json its last file
    there    <folder>/runs/<run id>            the run's own, where its supervisor and workers write
             <folder>/snapshots, <folder>/lib  by content, sent once; <folder>/carried likewise: what the job names here

Each call is one ssh, over a connection that is shared; `far` is what runs at its other end.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import secrets
import shlex
import subprocess
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from paceline.errors import TargetError
from paceline.remote.call import bootstrap_words, stream_program
from paceline.remote.library import library_digest, library_files
from paceline.remote.staging.manifest import FOLDER
from paceline.remote.staging.packing import Packed, add_json, pack_run
from paceline.remote.staging.stage_out_local import expect, is_over, take_record
from paceline.runs import states
from paceline.runs.folder import RunFolder
from paceline.system import links, locks
from paceline.system.files import write_json
from paceline.targets.slurm import login_helper
from paceline.targets.slurm.scheduler import AwayError, Scheduler
from paceline.targets.slurm.settings import SlurmSettings

#: How old a mirrored folder may be.
_FRESH_S = 1.0
#: What of a run's folder the cluster is given.
_SENT = ("run.json", "events.jsonl", "notes.jsonl", "target.json", "ballast", "secrets.json")

#: Files beside them that it gives.
_ALONE = ("run.json", *login_helper.ALONE)


@dataclass(frozen=True, kw_only=True)
class There:
    """Where a run lies on the cluster. user: its number there."""

    folder: str
    user: str
    run_dir: str
    library_dir: str


class Login:
    """The login host of a target."""

    def __init__(self, title: str, settings: SlurmSettings, scheduler: Scheduler) -> None:
        self._title, self._settings, self._scheduler = title, settings, scheduler
        self._python = settings.python or "python3"

    def push(self, folder: RunFolder, library_dir: Path) -> There:
        """Put the run's folder, its snapshot, the library, and the folders and packages of this machine that the job names
        on the cluster, as far as they are not there yet.

        Raises:
            TargetError: the login host can't be reached, or has no room.
            DataError, EnvironmentSpecError, TransferError: what the job names is not here, or can't be read; an output
                can't be stored here.
        """
        taken = pack_run(folder)
        expect(folder, taken.manifest.home if taken else ())
        snapshot = folder.snapshot.resolve()
        library = library_digest(library_dir)
        names = [f"snapshots/{snapshot.name}", f"lib/{library}"]
        names += [f"{FOLDER}/{tree}" for tree in (taken.files if taken else ())]
        answer = self._ask({"op": "have", "folder": self._settings.folder, "names": names})
        there = There(
            folder=answer["folder"],
            user=answer["user"],
            run_dir=f"{answer['folder']}/runs/{folder.run_id}",
            library_dir=f"{answer['folder']}/lib/{library}",
        )

        def write(stdin: IO[bytes]) -> None:
            with (
                gzip.GzipFile(fileobj=stdin, mode="wb", compresslevel=1) as packed,
                tarfile.open(fileobj=packed, mode="w|") as archive,
            ):
                if f"lib/{library}" in answer["missing"]:
                    for name, path in library_files(library_dir).items():
                        archive.add(path, f"lib/{library}/{name}")
                if f"snapshots/{snapshot.name}" in answer["missing"]:
                    archive.add(snapshot, f"snapshots/{snapshot.name}")
                for tree, files in (taken.files if taken else {}).items():
                    if f"{FOLDER}/{tree}" in answer["missing"]:
                        _add_tree(archive, tree, files)
                _add_run(archive, folder, snapshot.name, taken)

        self._ask({"op": "push", "folder": there.folder, "run_id": folder.run_id}, write)
        folder.secrets.unlink(missing_ok=True)  # its supervisor, who alone wants them, is there
        return there

    def pull(self, folder: RunFolder, run_dir: str) -> None:
        """Bring what is new on the cluster into the run's folder here, at most once a second, and until all has come.

        Raises:
            AwayError: the login host can't be reached.
        """
        with _one_at_a_time(folder) as is_due:
            if is_due and not is_over(folder):
                request = {
                    "op": "pull",
                    "run_dir": run_dir,
                    "have": _have(folder.path),
                    "final": sorted(states.TERMINAL),
                }
                self._ask(request, take=_Taker(folder).take)

    def put(self, path: str, value: object) -> None:
        """Write a small JSON file there."""
        self._ask({"op": "put", "path": path, "text": json.dumps(value) + "\n"})

    def remove(self, path: str) -> None:
        """Remove a file there, if there is one."""
        self._ask({"op": "remove", "path": path})

    def _ask(
        self,
        request: dict[str, Any],
        write: Callable[[IO[bytes]], None] | None = None,
        take: Callable[[dict[str, Any], bytes], None] = lambda header, data: None,
    ) -> dict[str, Any]:
        process, mark = self.open(request)
        assert process.stdin is not None
        with process:
            try:
                with contextlib.suppress(BrokenPipeError):
                    if write is not None:
                        write(process.stdin)
                    process.stdin.close()
                return self.take(process, mark, take)
            except BaseException:
                process.kill()
                raise

    def open(self, request: dict[str, Any]) -> tuple[subprocess.Popen[bytes], str]:
        """Ask the far side; the ssh, whose answer `take` reads, and the mark before it."""
        mark = f"PACELINE-{secrets.token_hex(8)}"
        main = f"main({mark!r}, sys.stdin.buffer, sys.stdout.buffer)"
        code = stream_program(links.__file__, login_helper.__file__, last=main)
        process = subprocess.Popen(
            self._scheduler.ssh_words(shlex.join(bootstrap_words(self._python))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(code + json.dumps(request).encode() + b"\n")
                process.stdin.flush()
        except BaseException:
            with process:
                process.kill()
            raise
        return process, mark

    def take(
        self, process: subprocess.Popen[bytes], mark: str, take: Callable[[dict[str, Any], bytes], None]
    ) -> dict[str, Any]:
        """Read an answer to its end; `take` is given each frame. The last one's header.

        Raises:
            AwayError: the login host can't be reached, or not any more.
            TargetError: what was asked for can't be done there.
        """
        assert process.stdout is not None
        for line in process.stdout:  # what the host's shell has to say comes first
            if line.strip() == mark.encode():
                break
        while (line := process.stdout.readline()).endswith(b"\n"):
            header = json.loads(line)
            data = process.stdout.read(header["bytes"])
            if len(data) < header["bytes"]:
                break
            if "error" in header:
                raise TargetError(
                    f"{self._title}: on the login host {self._settings.login}: {header['error']}. "
                    "Mend that, or choose another folder (the setting folder)."
                )
            if header.get("end"):
                answer: dict[str, Any] = header
                return answer
            take(header, data)
        assert process.stderr is not None
        said = process.stderr.read().decode(errors="replace").strip()
        code = process.wait()
        raise AwayError(
            f"{self._title}: the login host {self._settings.login} can't be used: {self._explain(said, code)}"
        )

    def _explain(self, said: str, code: int) -> str:
        from paceline.targets.ssh.failures import explain
        from paceline.targets.ssh.hosts import read_hosts

        host = read_hosts([self._settings.login or ""])[0]
        return explain(host, said, code, ["ssh", str(host)], self._python)


class _Taker:
    """Puts what comes into the run's folder: what grows at its end, everything else whole or not at all."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._parts: dict[str, Path] = {}

    def take(self, header: dict[str, Any], data: bytes) -> None:
        path = self._path(header["file"])
        path.parent.mkdir(parents=True, exist_ok=True)
        how = header["how"]
        if path == self._folder.record:
            take_record(self._folder, data)
        elif how == "link":
            self._link(path, header)
        elif how == "grow":
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            with open(os.open(path, flags, 0o666), "r+b", buffering=0) as file:
                if header["at"] == 0:
                    file.truncate()
                file.seek(header["at"])
                file.write(data)
        else:
            self._whole(path, header, data)

    def _link(self, path: Path, header: dict[str, Any]) -> None:
        target = links.target_in(header["file"], header["target"])
        if target is None:
            raise TargetError(
                f"the login host sent a link {header['file']!r} to {header['target']!r}, which leads out of the run's folder."
            )
        if not path.is_symlink() or os.readlink(path) != target:
            beside = path.with_name(f".{path.name}.{os.getpid()}")
            beside.symlink_to(target)
            os.replace(beside, path)

    def _whole(self, path: Path, header: dict[str, Any], data: bytes) -> None:
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        flags |= os.O_TRUNC if header.get("at", 0) == 0 else os.O_APPEND
        with open(os.open(beside, flags, 0o666), "ab", buffering=0) as file:
            file.write(data)
        if header["how"] == "part" and not header.get("last"):
            return
        os.chmod(beside, header["mode"])
        if "mtime" in header:
            os.utime(beside, ns=(header["mtime"], header["mtime"]))
        os.replace(beside, path)

    def _path(self, name: str) -> Path:
        parts, tops = name.split("/"), (*login_helper.LIVE, *login_helper.AT_THE_END)
        if any(part in ("", ".", "..") for part in parts) or parts[0] not in (tops if parts[1:] else _ALONE):
            raise TargetError(f"the login host sent a file {name!r}, which a run's folder must not take from it.")
        path = self._folder.path
        for part in parts[:-1]:
            path /= part
            if path.is_symlink():
                path.unlink()  # the user's own, there in a folder's place before
        return path / parts[-1]


def _have(top: Path) -> dict[str, list[int]]:
    found = {}
    for part in ("", *login_helper.LIVE, *login_helper.AT_THE_END):
        for directory, folders, files in os.walk(top / part):
            if not part:
                folders.clear()
            for name in files:
                path = os.path.join(directory, name)
                with contextlib.suppress(OSError):
                    stat = os.lstat(path)
                    found[os.path.relpath(path, top)] = [stat.st_size, stat.st_mtime_ns]
    return found


def _add_tree(archive: tarfile.TarFile, tree: str, files: Mapping[str, Path]) -> None:
    top = tarfile.TarInfo(f"{FOLDER}/{tree}")
    top.type, top.mode = tarfile.DIRTYPE, 0o755
    archive.addfile(top)
    for name, path in sorted(files.items()):
        # Each file as itself: one of several names is a link to the first in archives that are made of folders.
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            item = tarfile.TarInfo(f"{FOLDER}/{tree}/{name}")
            item.size, item.mtime = found.st_size, int(found.st_mtime)
            item.mode = 0o555 if found.st_mode & 0o100 else 0o444
            archive.addfile(item, file)


def _add_run(archive: tarfile.TarFile, folder: RunFolder, snapshot: str, packed: Packed | None) -> None:
    top = f"runs/{folder.run_id}"
    for name in ("logs", "outputs", "metrics", "checkpoints"):
        item = tarfile.TarInfo(f"{top}/{name}")
        item.type, item.mode = tarfile.DIRTYPE, 0o755
        archive.addfile(item)
    for name in _SENT:
        if (folder.path / name).is_file():
            archive.add(folder.path / name, f"{top}/{name}")
    link = tarfile.TarInfo(f"{top}/snapshot")
    link.type, link.linkname = tarfile.SYMTYPE, f"../../snapshots/{snapshot}"
    archive.addfile(link)
    # So that its supervisor, and whoever reads the run there, know whose it is.
    add_json(archive, f"{top}/{folder.engine.name}", {"engine": "slurm"})
    if packed is not None:
        add_json(archive, f"{top}/{folder.carried.name}", packed.manifest.to_json())


@contextlib.contextmanager
def _one_at_a_time(folder: RunFolder) -> Iterator[bool]:
    """Whether the folder's mirror is due, held against other readers; they wait, and then it is not."""
    path = folder.path / "mirrored.json"
    with locks.locked(folder.path / "mirror.lock"):
        try:
            is_due = abs(time.time() - path.stat().st_mtime) >= _FRESH_S
        except OSError:
            is_due = True
        yield is_due
        if is_due:
            write_json(path, {"time": time.time()})
