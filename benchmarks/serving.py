"""What the benchmarks of serving share: servers as processes, wrk, and what a server has in memory."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

_UNITS = {"us": 0.001, "ms": 1.0, "s": 1000.0}


class Load(NamedTuple):
    """What wrk has measured. failures: answers other than 2xx or 3xx, and broken connections."""

    per_second: float
    p50_ms: float
    p99_ms: float
    failures: int


def wrk(url: str, body: str, clients: int, seconds: int) -> Load:
    """POST `body` from so many connections for so long."""
    if shutil.which("wrk") is None:
        raise SystemExit("wrk is not installed. apt-get install wrk")
    script = Path(os.environ["PACELINE_LEASES"]).parent / "post.lua"
    script.write_text(
        f"wrk.method = 'POST'\nwrk.body = [==[{body}]==]\nwrk.headers['Content-Type'] = 'application/json'\n"
    )
    threads = min(2, clients)
    command = ["wrk", f"-t{threads}", f"-c{clients}", f"-d{seconds}s", "--latency", "-s", str(script), url]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def found(pattern: str) -> Any:
        match = re.search(pattern, text)
        return match if match is not None else None

    def ms(percent: int) -> float:
        match = found(rf"{percent}%\s+([\d.]+)(us|ms|s)\b")
        return float(match[1]) * _UNITS[match[2]]

    wrong = found(r"Non-2xx or 3xx responses: (\d+)")
    broken = found(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)")
    failures = (int(wrong[1]) if wrong else 0) + (sum(map(int, broken.groups())) if broken else 0)
    return Load(float(found(r"Requests/sec:\s+([\d.]+)")[1]), ms(50), ms(99), failures)


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        port: int = made.getsockname()[1]
        return port


def answered(url: str, body: str, patience_s: float = 120.0) -> str:
    """The first answer of a server, asked again and again until there is one."""
    deadline = time.monotonic() + patience_s
    request = urllib.request.Request(url, body.encode(), {"content-type": "application/json"})
    while True:
        try:
            with urllib.request.urlopen(request, timeout=patience_s) as answer:
                text: str = answer.read().decode()
                return text
        except (urllib.error.URLError, ConnectionError) as error:
            if time.monotonic() > deadline:
                raise SystemExit(f"{url} does not answer: {error}") from error
            time.sleep(0.005)


@contextlib.contextmanager
def process(
    command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A server's process, ended with all below it."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log", "ab") as log:
        made = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield made
    finally:
        made.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            made.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(made.pid, signal.SIGKILL)
        made.wait()


def configured(folder: Path, script: str, **values: Any) -> list[str]:
    """The command of Paceline's own server for this script, at a port of its own choice (`port_of`)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "score.py").write_text(script)
    config = {"name": "bench", "entry_script": "score.py", "source_dir": ".", "log_level": "info", **values}
    (folder / "config.json").write_text(json.dumps(config))
    return [sys.executable, "-m", "paceline.serving", str(folder / "config.json")]


def resident_mib(pid: int) -> float:
    """What a process and all below it have in memory; pages that several share count once."""
    pids, total = [pid], 0
    for one in pids:
        with contextlib.suppress(OSError):
            children = Path(f"/proc/{one}/task/{one}/children").read_text()
            pids += map(int, children.split())
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1])
    return total / 1024
