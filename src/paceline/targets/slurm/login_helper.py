"""A program, sent as text to a login host, that stores runs and returns changes.

It needs only Python 3.6 and the standard library, since login hosts may have nothing else. Three modules precede it in the
text: `system.links`, `remote.wire` and `remote.replica.changes`.

    in     the request as a line of JSON; for "push" followed by a tar.gz
    out    MARK on a line of its own, then frames (`wire`); the last has "over" or "error"

    have    {"folder", "names"} -> the names that are missing below the folder, the folder's full path, the uid
    push    {"folder", "run_id"} and an archive of lib/, snapshots/, carried/ and runs/; existing folders stay
            -> "known", the size, time and inode of each file that both sides have
    pull    {"run_dir", "known", "final"} -> changes (`changes`); the user's files only at the end of the run
    put     {"path", "text"}: write a small file
    remove  {"path"}: remove a file, if it exists
    exec    {"run_dir", "name", "request"}: run a command beside a worker (`paceline.supervisor.execute`); input follows as
            lines of JSON, an empty line per second. Answers with frames of output, or {"error"}. The command ends when
            the input ends or pauses for 15 s
"""

import json
import os
import shutil
import tarfile
import tempfile
import threading
import time
from typing import IO

if "Changes" not in globals():  # false on a login host, where the modules below and this one are parts of one script
    from paceline.remote.replica.changes import LARGE, WORK, Changes, small_names
    from paceline.remote.wire import Header, frame

PARTS = ("lib", "snapshots", "carried", "runs")
SILENCE_S = 15.0
LOOK_S = 0.02


def main(mark: str, stdin: IO[bytes], stdout: IO[bytes]) -> None:
    request = json.loads(stdin.readline().decode())
    # Begin a new line, in case the login shell has printed an unfinished line.
    stdout.write(("\n" + mark + "\n").encode())
    try:
        todo = {"have": have, "push": push, "pull": pull, "put": put, "remove": remove, "exec": execute}
        answer = todo[request["op"]](request, stdin, stdout)
        stdout.write(frame(dict(answer or {}, over=True)))
    except (OSError, tarfile.TarError, EOFError) as error:
        stdout.write(frame({"error": str(error)}))
    stdout.flush()
    if request["op"] == "exec":
        os._exit(0)  # exit without waiting for the thread that reads standard input


def have(request: "Header", stdin: IO[bytes], stdout: IO[bytes]) -> "Header":
    folder = os.path.abspath(os.path.expanduser(request["folder"]))
    missing = [name for name in request["names"] if not os.path.isdir(os.path.join(folder, name))]
    return {"folder": folder, "user": str(os.geteuid()), "missing": missing}


def push(request: "Header", stdin: IO[bytes], stdout: IO[bytes]) -> "Header":
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
        # Rename folders, so that a kill leaves no incomplete folder. Rename `runs` last: it links to the others.
        for name in PARTS:
            if not os.path.isdir(os.path.join(beside, name)):
                continue
            for entry in os.listdir(os.path.join(beside, name)):
                try:
                    os.rename(os.path.join(beside, name, entry), os.path.join(folder, name, entry))
                except OSError:
                    # If the folder exists, don't replace it: its name is a hash of its content, so its content is equal.
                    if not os.path.isdir(os.path.join(folder, name, entry)):
                        raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    run_dir = os.path.join(folder, "runs", request["run_id"])
    changes = Changes(run_dir, {})
    changes.skip(list(small_names(run_dir)))
    return {"known": changes.known}


def pull(request: "Header", stdin: IO[bytes], stdout: IO[bytes]) -> None:
    changes = Changes(request["run_dir"], request["known"])
    header, data, has_ended = changes.record(request["final"])
    for found in changes.small(small_names(request["run_dir"])):
        stdout.write(frame(*found))
    # Send large files only after the run's end. Otherwise readers of the run's status would wait for these files.
    for piece in changes.large(True, (*LARGE, WORK)) if has_ended else ():
        if piece is not None:
            stdout.write(frame(*piece))
    stdout.write(frame(header, data))


def remove(request: "Header", stdin: IO[bytes], stdout: IO[bytes]) -> None:
    try:
        os.unlink(request["path"])
    except FileNotFoundError:
        pass


def put(request: "Header", stdin: IO[bytes], stdout: IO[bytes]) -> None:
    write_beside(request["path"], request["text"])


def execute(request: "Header", stdin: IO[bytes], stdout: IO[bytes]) -> None:
    top = os.path.join(request["run_dir"], "exec")
    folder, hidden = os.path.join(top, request["name"]), os.path.join(top, "." + request["name"])
    try:
        os.makedirs(hidden, mode=0o700)
        os.chmod(top, 0o700)
        write_beside(os.path.join(hidden, "request.json"), json.dumps(request["request"]))
        os.rename(hidden, folder)
        passing = Passing(folder)
        # Pass on the input in a thread, so that neither the input nor the output has to wait for the other.
        threading.Thread(target=passing.pass_on, args=(stdin,), daemon=True).start()
        give_back(request["run_dir"], folder, passing, stdout)
    finally:
        # Remove the request's folder: the supervisor then ends the command.
        shutil.rmtree(hidden, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            os.rmdir(top)
        except OSError:
            pass  # keep `top`, because it still has requests of other commands


class Passing:
    """A writer that passes the client's input lines to a command through files.

    `heard` is the monotonic time of the client's last line, or None after the input's end.
    """

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
            pass  # the folder is gone, because the command has ended


def give_back(run_dir: str, folder: str, passing: Passing, stdout: IO[bytes]) -> None:
    """Send a command's output to the client until the command or the client ends."""
    output = None
    read = told = 0
    while True:
        # Check whether the command has ended before reading its output, because the file has all output only after the end.
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
    """Write a file atomically, first under another name in the same folder."""
    beside = path + ".incoming"
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text)
    os.rename(beside, path)
