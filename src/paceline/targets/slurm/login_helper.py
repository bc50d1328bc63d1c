"""Runs on a login host, sent there as text: puts a run's folder there, and gives back what has come to it.

Standard library of Python 3.6 and later, for that is what login hosts have. Nothing of Paceline may be imported, but for what is
sent before it: `system.links`, `remote.wire` and `remote.replica.changes`.

    in     a line of JSON, the request; then, for "push", a tar.gz
    out    MARK on a line of its own, then frames (`wire`); the last has "over" or "error"

    have    {"folder", "names"} -> which of these, below the folder, are missing, its full path, the user's number
    push    {"folder", "run_id"} and an archive of lib/, snapshots/, carried/ and runs/: what is there is left as it is
            -> "known", what of the run's folder both sides have
    pull    {"run_dir", "known", "final"} -> what is new in it (`changes`); the user's files at the end of the run alone
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

if "Changes" not in globals():  # there the texts of these modules stand above this one
    from paceline.remote.replica.changes import LARGE, WORK, Changes, small_names
    from paceline.remote.wire import frame

PARTS = ("lib", "snapshots", "carried", "runs")
SILENCE_S = 15.0
LOOK_S = 0.02


def main(mark: str, stdin: IO[bytes], stdout: IO[bytes]) -> None:
    request = json.loads(stdin.readline().decode())
    # On a line of its own: a login shell may have greeted without ending its line.
    stdout.write(("\n" + mark + "\n").encode())
    try:
        todo = {"have": have, "push": push, "pull": pull, "put": put, "remove": remove, "exec": execute}
        answer = todo[request["op"]](request, stdin, stdout)
        stdout.write(frame(dict(answer or {}, over=True)))
    except (OSError, tarfile.TarError, EOFError) as error:
        stdout.write(frame({"error": str(error)}))
    stdout.flush()
    if request["op"] == "exec":
        os._exit(0)  # a thread still waits for standard input, which an interpreter does not end with


def have(request: "dict[str, Any]", stdin: IO[bytes], stdout: IO[bytes]) -> "dict[str, Any]":
    folder = os.path.abspath(os.path.expanduser(request["folder"]))
    missing = [name for name in request["names"] if not os.path.isdir(os.path.join(folder, name))]
    return {"folder": folder, "user": str(os.geteuid()), "missing": missing}


def push(request: "dict[str, Any]", stdin: IO[bytes], stdout: IO[bytes]) -> "dict[str, Any]":
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
        # By names in one file system, each at once, so that a call that is cut off leaves nothing half there. The run last:
        # its folder has links to the others.
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
    run_dir = os.path.join(folder, "runs", request["run_id"])
    changes = Changes(run_dir, {})
    changes.skip(list(small_names(run_dir)))
    return {"known": changes.known}


def pull(request: "dict[str, Any]", stdin: IO[bytes], stdout: IO[bytes]) -> None:
    changes = Changes(request["run_dir"], request["known"])
    header, data, has_ended = changes.record(request["final"])
    for found in changes.small(small_names(request["run_dir"])):
        stdout.write(frame(*found))
    # Not before: whoever asks for the run's status would wait for files of any size.
    for piece in changes.large(True, (*LARGE, WORK)) if has_ended else ():
        if piece is not None:
            stdout.write(frame(*piece))
    stdout.write(frame(header, data))


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
                    stdout.write(frame({"said": True}, json.dumps(answer).encode() + b"\n"))
                    return
                output = open(os.path.join(run_dir, answer["output"]), "rb")  # noqa: SIM115
            except FileNotFoundError:
                pass
        data = output.read(1 << 16) if output is not None else b""
        if data:
            stdout.write(frame({"said": True}, data))
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
