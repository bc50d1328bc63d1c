"""Runs on a login host, sent there as text: puts a run's folder there, and gives back what has come to it.

Standard library of Python 3.6 and later, for that is what login hosts have. Nothing of Paceline may be imported.

    in     a line of JSON, the request; then, for "push", a tar.gz
    out    MARK, then frames: a line of JSON, then as many raw bytes as its "bytes" says; the last has "end" or "error"

    have    {"folder", "names"} -> which of these, below the folder, are missing, its full path, the user's number
    push    {"folder", "run_id"} and an archive of lib/, snapshots/, carried/ and runs/: what is there is left as it is
    pull    {"run_dir", "have": {name: [size, time of change]}, "final"} -> what is new in it, run.json last
    put     {"path", "text"}: a small file
    remove  {"path"}: a file, which need not be there
    exec    {"run_dir", "name", "request"}: a command beside a worker (`paceline.supervisor.execute`); then lines of
            JSON come, what is passed on to it, empty ones every second. Frames with its output as it grows (or {"error"}
            in place of it). When nothing comes any more, or for 15 s, it is ended
"""

import json
import os
import shutil
import tarfile
import tempfile
import threading
import time
from typing import IO, Any

if "entries" not in globals():  # there the text of that module stands above this one
    from paceline.system.links import entries, find, open_below

GROWING = (".log", ".jsonl", ".txt")
LIVE = ("attempts", "metrics", "prepared", "logs")
AT_THE_END = ("outputs", "artifacts", "uploads", "checkpoints")
PARTS = ("lib", "snapshots", "carried", "runs")
ALONE = ("events.jsonl", "notes.jsonl", "environment.json", "data.json", "left_out.jsonl")
SILENCE_S = 15.0
LOOK_S = 0.02


def main(mark: str, stdin: IO[bytes], stdout: IO[bytes]) -> None:
    request = json.loads(stdin.readline().decode())
    stdout.write(("\n" + mark + "\n").encode())
    try:
        answer = None
        if request["op"] == "have":
            answer = have(request, stdin, stdout)
        else:
            todo = {"push": push, "pull": pull, "put": put, "remove": remove, "exec": execute}
            todo[request["op"]](request, stdin, stdout)
        frame(stdout, dict(answer or {}, end=True))
    except (OSError, tarfile.TarError, EOFError) as error:
        frame(stdout, {"error": str(error)})
    stdout.flush()
    if request["op"] == "exec":
        os._exit(0)  # a thread still waits for standard input, which an interpreter does not end with


def frame(stdout: IO[bytes], header: "dict[str, Any]", data: bytes = b"") -> None:
    stdout.write(json.dumps(dict(header, bytes=len(data))).encode() + b"\n" + data)


def have(request: "dict[str, Any]", stdin: IO[bytes], stdout: IO[bytes]) -> "dict[str, Any]":
    folder = os.path.abspath(os.path.expanduser(request["folder"]))
    missing = [name for name in request["names"] if not os.path.isdir(os.path.join(folder, name))]
    return {"folder": folder, "user": str(os.geteuid()), "missing": missing}


def push(request: "dict[str, Any]", stdin: IO[bytes], stdout: IO[bytes]) -> None:
    folder = request["folder"]
    for name in PARTS:
        os.makedirs(os.path.join(folder, name), exist_ok=True)
    beside = tempfile.mkdtemp(prefix=".incoming-", dir=folder)
    try:
        with tarfile.open(fileobj=stdin, mode="r|gz") as archive:
            for item in archive:
                parts = item.name.split("/")
                if item.name.startswith("/") or ".." in parts:
                    raise OSError("the archive has a name that leaves its folder: " + item.name)
                archive.extract(item, beside)
        # The run last: its folder has links to the others.
        for name in PARTS:
            if not os.path.isdir(os.path.join(beside, name)):
                continue
            for entry in os.listdir(os.path.join(beside, name)):
                try:
                    os.rename(os.path.join(beside, name, entry), os.path.join(folder, name, entry))
                except OSError:
                    # Somebody else has brought it meanwhile; its name says what is in it.
                    if not os.path.isdir(os.path.join(folder, name, entry)):
                        raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def pull(request: "dict[str, Any]", stdin: IO[bytes], stdout: IO[bytes]) -> None:
    top, known = request["run_dir"], request["have"]
    with open(os.path.join(top, "run.json"), "rb") as file:
        record = file.read()  # first read, last sent: all else is at least as new
    ended = json.loads(record.decode()).get("status") in request["final"]
    for name in ALONE:
        send(top, name, name, known.get(name), stdout)
    for part in LIVE:
        for directory, folders, files in os.walk(os.path.join(top, part)):
            folders.sort()
            for name in (os.path.relpath(os.path.join(directory, name), top) for name in sorted(files)):
                if not name.endswith(".held") and not os.path.basename(name).startswith("exec_"):
                    send_live(top, name, known.get(name), stdout)
    # What of the user's files is left out, and why, the run's record says.
    for part in AT_THE_END if ended else ():
        for entry in entries(top, part):
            if entry.kind == "link":
                frame(stdout, {"file": entry.name, "how": "link", "target": entry.target})
            elif entry.kind == "file":
                send(top, entry.name, entry.real, known.get(entry.name), stdout)
    frame(stdout, {"file": "run.json", "how": "whole", "mode": 0o644}, record)  # (its mode is the taker's to choose)


def send_live(top: str, name: str, known: "list[int] | None", stdout: IO[bytes]) -> None:
    path = os.path.join(top, name)
    if not os.path.islink(path):
        send(top, name, name, known, stdout)
        return
    entry = find(top, name)  # logs of the attempt that runs
    if name.startswith("logs/") and entry is not None and entry.kind == "file":
        target = os.path.relpath(
            os.path.join(os.path.realpath(top), entry.real), os.path.realpath(os.path.dirname(path))
        )
        frame(stdout, {"file": name, "how": "link", "target": target})


def send(top: str, name: str, real: str, known: "list[int] | None", stdout: IO[bytes]) -> None:
    """Send the file that lies at `real` under its name, unless the other side has it already."""
    try:
        with os.fdopen(open_below(top, real), "rb") as file:
            found = os.fstat(file.fileno())
            stamp = [found.st_size, found.st_mtime_ns]
            start, grows = 0, name.endswith(GROWING) and name.split(os.sep, 1)[0] not in AT_THE_END
            if grows and known:
                start = known[0] if known[0] <= found.st_size else 0
                if start == found.st_size:
                    return
            elif known and known == stamp:
                return
            file.seek(start)
            left = found.st_size - start
            while True:
                data = file.read(min(left, 1 << 20))
                left -= len(data)
                header = {"file": name, "how": "grow" if grows else "part", "at": start, "mode": found.st_mode & 0o777}
                if left <= 0 or not data:
                    frame(stdout, dict(header, last=True, mtime=found.st_mtime_ns), data)
                    return
                frame(stdout, header, data)
                start += len(data)
    except OSError:
        return  # it has gone meanwhile


def remove(request: "dict[str, Any]", stdin: IO[bytes], stdout: IO[bytes]) -> None:
    try:
        os.unlink(request["path"])
    except FileNotFoundError:
        pass


def put(request: "dict[str, Any]", stdin: IO[bytes], stdout: IO[bytes]) -> None:
    write_beside(request["path"], request["text"])


def execute(request: "dict[str, Any]", stdin: IO[bytes], stdout: IO[bytes]) -> None:
    top = os.path.join(request["run_dir"], "exec")
    folder, hidden = os.path.join(top, request["name"]), os.path.join(top, "." + request["name"])
    try:
        os.makedirs(hidden, mode=0o700)
        os.chmod(top, 0o700)
        write_beside(os.path.join(hidden, "request.json"), json.dumps(request["request"]))
        os.rename(hidden, folder)
        passing = Passing(folder)
        # Apart from what goes out: neither direction waits for the other one.
        threading.Thread(target=passing.pass_on, args=(stdin,), daemon=True).start()
        give_back(request["run_dir"], folder, passing, stdout)
    finally:
        # By this the supervisor knows as well.
        shutil.rmtree(hidden, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            os.rmdir(top)
        except OSError:
            pass  # others have theirs in it


class Passing:
    """What is passed on to a command. heard: when something came last; None once nothing does any more."""

    def __init__(self, folder: str) -> None:
        self.heard = time.monotonic()  # type: float | None
        self._folder = folder
        self._count = 0
        self._lock = threading.Lock()

    def pass_on(self, stdin: IO[bytes]) -> None:
        for line in iter(stdin.readline, b""):
            self.heard = time.monotonic()
            if line.strip() and line.endswith(b"\n"):
                self.tell(line.decode())
            else:
                self._write("alive", str(self.heard))
        self.heard = None

    def tell(self, text: str) -> None:
        with self._lock:
            self._write(f"in_{self._count}.json", text)
            self._count += 1

    def _write(self, name: str, text: str) -> None:
        try:
            write_beside(os.path.join(self._folder, name), text)
        except FileNotFoundError:
            pass  # it is over


def give_back(run_dir: str, folder: str, passing: Passing, stdout: IO[bytes]) -> None:
    """Send what it says, until it has ended, or nobody is there."""
    output = None
    read = told = 0
    while True:
        # First whether it is over: then all that it has said is there.
        is_over = not os.path.isdir(folder)
        if output is None:
            try:
                with open(os.path.join(folder, "answer.json"), encoding="utf-8") as file:
                    answer = json.load(file)
                if "error" in answer:
                    frame(stdout, {"said": True}, json.dumps(answer).encode() + b"\n")
                    return
                output = open(os.path.join(run_dir, answer["output"]), "rb")  # noqa: SIM115
            except FileNotFoundError:
                pass
        data = output.read(1 << 16) if output is not None else b""
        if data:
            frame(stdout, {"said": True}, data)
            stdout.flush()
            read += len(data)
            if read - told > 1 << 19:
                told = read
                passing.tell(json.dumps({"read": read}))
        elif is_over or passing.heard is None or time.monotonic() - passing.heard > SILENCE_S:
            return
        else:
            time.sleep(LOOK_S)


def write_beside(path: str, text: str) -> None:
    """Write a file that is whole under its name."""
    beside = path + ".incoming"
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text)
    os.rename(beside, path)
