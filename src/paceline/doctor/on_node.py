"""The doctor's program that runs on a node, with three modes that take a JSON argument: `facts`, `listen` and `connect`.

A Python on the node gets this program as text (`paceline.remote.foreign_python`). So the program needs only the
standard library, and imports nothing of Paceline. Programs that it calls may hang, because of a GPU driver or a lost
file system. So each call has a time limit, and the program does not wait for the end of killed programs.

    facts   {"python": ..., "space": [...], "modules": [...], "library_dir": ..., "timeout_s": ...}
    listen  {"address": ..., "port": ..., "token": ..., "count": ..., "timeout_s": ...}
    connect {"peers": [[name, address, port], ...], "token": ..., "timeout_s": ...}
"""

from __future__ import annotations

import json
import os
import platform
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

Asked = dict[str, Any]
Answer = dict[str, Any]

#: Prefix of the line with the result of `_MODULES`, because an imported module may print other lines.
_MARK = "PACELINE-MODULES "

#: Program that imports modules in the scripts' interpreter, which may have any version of Python.
_MODULES = r"""
import json, sys
found = {}
for name in sys.argv[1:]:
    try:
        if name == "mpi4py":
            import mpi4py
            mpi4py.rc.initialize = False
            from mpi4py import MPI
            detail = MPI.Get_library_version().split("\0")[0].splitlines()[0].split(",")[0]
        else:
            detail = ""
        module = __import__(name)
        entry = {"version": str(getattr(module, "__version__", "?")), "detail": detail}
        if name == "torch":
            entry["detail"] = "CUDA %s" % module.version.cuda if module.version.cuda else "no CUDA"
            entry["gpus"] = module.cuda.device_count() if module.version.cuda else 0
        found[name] = entry
    except ImportError as error:
        missing = getattr(error, "name", None) == name
        found[name] = {"missing": missing, "error": "%s: %s" % (type(error).__name__, error)}
    except BaseException as error:
        found[name] = {"missing": False, "error": "%s: %s" % (type(error).__name__, error)}
sys.stdout.write("\nPACELINE-MODULES " + json.dumps(found) + "\n")
"""


def facts(asked: Asked) -> Answer:
    """Return this node's Python, disk space and modules."""
    python = asked["python"]
    timeout_s = float(asked["timeout_s"])
    known: Answer = {
        "host": socket.gethostname(),
        "agent_python": platform.python_version(),
        "python": {"path": python},
        "space": {path: space(os.path.expanduser(path)) for path in asked["space"]},
        "limits": {
            "nofile": _limit("RLIMIT_NOFILE"),
            "memlock": _limit("RLIMIT_MEMLOCK"),
            "nproc": _limit("RLIMIT_NPROC"),
            "core": _limit("RLIMIT_CORE"),
        },
        "gpus": gpus(),
        "stacks": stacks(python),
    }
    version, error = output([python, "-c", "import sys; print('%d.%d.%d' % sys.version_info[:3])"], 20.0)
    known["python"] |= {"error": error} if error else {"version": version.strip()}
    if not error:
        known["modules"] = marked(*output([python, "-c", _MODULES, *asked["modules"]], timeout_s))
        known["open_mpi"] = open_mpi(python, asked["library_dir"])
    return known


def space(path: str) -> Answer:
    """Return the free and total bytes of a path's file system, or an error."""
    there = path  # create nothing: if the folder is missing, check its nearest existing parent
    while not os.path.isdir(there) and os.path.dirname(there) != there:
        there = os.path.dirname(there)
    try:
        usage = shutil.disk_usage(there)
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x" * 4096)
            file.flush()
    except OSError as error:
        return {"error": f"{there}: {error.strerror or error}"}
    return {"free": usage.free, "total": usage.total}


def gpus() -> Answer:
    """Return the GPUs that nvidia-smi lists, or its failure."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {"devices": [], "has_tool": False}
    query = "--query-gpu=name,driver_version,memory.total"
    text, error = output([tool, query, "--format=csv,noheader,nounits"], 30.0)
    if error:
        return {"devices": [], "has_tool": True, "error": error}
    rows = [[part.strip() for part in line.split(",")] for line in text.splitlines() if line.strip()]
    return {"devices": rows, "has_tool": True}


def open_mpi(python: str, library_dir: str) -> Answer:
    """Return the path and version of the mpirun that scripts use, or an error."""
    # Search for `mpirun` as the launcher does, by a process that can import Paceline: this program can't.
    code = (
        "import sys; from paceline.launchers.mpi import find_open_mpi; from paceline.errors import PacelineError\n"
        "try: found = find_open_mpi(sys.argv[1]); print(found.mpirun); print('%d.%d' % found.version)\n"
        "except PacelineError as error: sys.exit(str(error))"
    )
    text, error = output([sys.executable, "-c", code, python], 60.0, {**os.environ, "PYTHONPATH": library_dir})
    if error:
        return {"error": error}
    path, version = text.strip().splitlines()[-2:]
    return {"path": path, "version": version}


def listen(asked: Asked) -> Answer:
    """Answer `count` connections that send the token. Return {"answered": their number}."""
    deadline = time.monotonic() + asked["timeout_s"]
    answered = 0
    with socket.socket() as server:
        # Reuse the address: the port was free a moment ago, and earlier connections may be in TIME_WAIT.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((asked["address"], asked["port"]))
        server.listen(128)
        while answered < asked["count"] and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                client, _ = server.accept()
                with client:
                    client.settimeout(min(5.0, left))
                    if client.makefile("rb").readline().decode().strip() == asked["token"]:
                        client.sendall(f"{asked['token']} {socket.gethostname()}\n".encode())
                        answered += 1
            except OSError:
                continue
    return {"answered": answered}


def connect(asked: Asked) -> Answer:
    """Connect to all peers in parallel. Return {node: {"ms": duration, "host": answering host} or {"error"}}."""
    results: Answer = {}
    # Connect in parallel: if a firewall drops packets, all connections run into the time limit at the same time.
    threads = [threading.Thread(target=_connect, args=(asked, *peer, results), daemon=True) for peer in asked["peers"]]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + asked["timeout_s"] + 2.0
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return {name: results.get(name, {"error": "no answer"}) for name, _, _ in asked["peers"]}


def _connect(asked: Asked, name: str, address: str, port: int, results: Answer) -> None:
    deadline = time.monotonic() + asked["timeout_s"]
    error = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        start = time.monotonic()
        try:
            with socket.create_connection((address, port), timeout=left) as client:
                client.settimeout(left)
                client.sendall(f"{asked['token']}\n".encode())
                answer = client.makefile("rb").readline().decode().split()
            if answer[:1] == [asked["token"]]:
                results[name] = {"ms": (time.monotonic() - start) * 1e3, "host": answer[1] if answer[1:] else ""}
                return
            error = "somebody else answers there"
        except ConnectionRefusedError as refused:
            error = str(refused.strerror)  # the listener may not have started yet, so try again
        except OSError as failed:
            error = str(failed.strerror or failed)
        time.sleep(0.1)
    results[name] = {"error": error}


def output(argv: list[str], timeout_s: float, environment: dict[str, str] | None = None) -> tuple[str, str]:
    """Return (standard output, "") of a program, or ("", reason of its failure)."""
    # Use files and not pipes: a grandchild could keep a pipe open, and the read would not end.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=environment, start_new_session=True
            )
        except OSError as error:
            return "", f"{argv[0]}: {error.strerror or error}"
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # do not wait for the killed process: it may hang in a system call
            return "", f"{os.path.basename(argv[0])} gave no answer in {timeout_s:.0f} s"
        out.seek(0)
        err.seek(0)
        text = out.read().decode(errors="replace")
        if code != 0:
            said = (err.read().decode(errors="replace").strip() or text.strip()).splitlines()
            return "", said[-1][:300] if said else f"{os.path.basename(argv[0])} ended with {code}"
        return text, ""


def marked(text: str, error: str) -> Answer:
    """Return a program's answer, the JSON after `_MARK` in `text`, or {"error": reason}."""
    if error:
        return {"error": error}
    lines = [line for line in text.splitlines() if line.startswith(_MARK)]
    return json.loads(lines[-1][len(_MARK) :]) if lines else {"error": "gave no answer"}


def stacks(python: str) -> Answer:
    """Return py-spy's path on this node, and whether py-spy may read processes.

    The result's "py_spy" is None if py-spy is not installed. "refused" is py-spy's error message when it tried to read
    a process that py-spy had not started, such as a worker; "" if there was no error.
    """
    spy = shutil.which("py-spy", path=os.pathsep.join((os.path.dirname(python), os.environ.get("PATH", ""))))
    return {
        "ptrace_scope": _line("/proc/sys/kernel/yama/ptrace_scope"),
        # Bit 19 of the capabilities is CAP_SYS_PTRACE, see capabilities(7).
        "may_trace": bool(int(_field("/proc/self/status", "CapEff") or "0", 16) >> 19 & 1),
        "py_spy": spy,
        "refused": _refused(spy, python) if spy else "",
    }


def _refused(spy: str, python: str) -> str:
    # Try py-spy too: a container, a security module or an old py-spy may make it fail although the settings allow it.
    try:
        seen = subprocess.Popen(
            [python, "-c", "import time; print(flush=True); time.sleep(60)"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:
        return ""  # another check reports that this interpreter does not run
    assert seen.stdout is not None
    try:
        # Wait for the process's first line: py-spy finds no interpreter in a process that has not loaded it yet.
        if not select.select([seen.stdout], [], [], 20.0)[0]:
            return ""
        return output([spy, "dump", "--nonblocking", "--pid", str(seen.pid)], 20.0)[1]
    finally:
        seen.kill()
        seen.stdout.close()
        seen.wait()


def _line(path: str) -> str:
    try:
        with open(path) as file:
            return file.readline().strip()
    except OSError:
        return ""


def _field(path: str, name: str) -> str:
    try:
        with open(path) as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith(name + ":")), "")
    except OSError:
        return ""


def _limit(name: str) -> int | None:
    value = resource.getrlimit(getattr(resource, name))[0]
    return None if value == resource.RLIM_INFINITY else value
