"""`paceline dev` to the first answer of a kernel, through the printed address: on this machine, on an ssh host, in Slurm.

The session has a JupyterLab in an environment of its own: python -m venv lab; lab/bin/pip install jupyterlab. A client does
what the page does: it starts a kernel and sends it one cell. On Slurm the time that the job was Queued does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from websockets.sync.client import connect

from common import in_turn, median, program, report, scratch
from elsewhere import LACKS, slurm, ssh
from paceline.runs.record import parse_utc

ROUNDS = 3
TARGETS = {"local": 3.0, "ssh": 5.0, "slurm": 8.0}
WHERE = {"local": "this machine", "ssh": "an ssh host", "slurm": "a node of Slurm, beyond the scheduler"}


@contextlib.contextmanager
def place(name: str) -> Iterator[tuple[list[str], Mapping[str, str], Path]]:
    """The words after `paceline dev`, the environment and the folder of a session."""
    if name == "local":
        with scratch() as folder:
            yield [], dict(os.environ), folder
    elif name == "ssh":
        with ssh() as there:
            yield ["there"], there.environment, there.folder
    else:
        with slurm() as (there, _):
            yield ["there"], there.environment, there.folder


def answer_s(words: list[str], environment: Mapping[str, str], folder: Path) -> float:
    """Seconds from the command to the first answer of a kernel."""
    before = time.time()
    process = subprocess.Popen(
        [program("paceline"), "dev", *words],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    found = re.match(r"http://127\.0\.0\.1:(\d+)/lab\?token=(\w+)", line)
    assert found, process.stderr.read()
    _first_answer(int(found[1]), found[2])
    took = time.time() - before
    process.send_signal(signal.SIGINT)
    _, told = process.communicate()
    run_id = re.search(r"paceline dev --run (\S+)\.", told)
    assert run_id, told
    subprocess.run(
        [program("paceline"), "cancel", "--wait", run_id[1]],
        env=environment,
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return took - _queued_s(Path(environment["PACELINE_WORKSPACE"]) / "runs" / run_id[1] / "events.jsonl")


def _first_answer(port: int, token: str) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = {"Authorization": f"token {token}"}
    made = urllib.request.Request(f"http://127.0.0.1:{port}/api/kernels", data=b"{}", headers=headers, method="POST")
    kernel = json.load(opener.open(made, timeout=120))["id"]
    header = {"msg_id": "1", "username": "", "session": "s", "msg_type": "execute_request", "version": "5.3"}
    cell = {"header": header, "parent_header": {}, "metadata": {}, "channel": "shell", "buffers": []}
    with connect(
        f"ws://127.0.0.1:{port}/api/kernels/{kernel}/channels?token={token}", max_size=None, proxy=None
    ) as socket:
        socket.send(json.dumps({**cell, "content": {"code": "print(6 * 7)", "silent": False}}))
        while True:
            message = json.loads(socket.recv(timeout=120))
            if message["msg_type"] == "stream" and "42" in message["content"]["text"]:
                return


def _queued_s(events: Path) -> float:
    """Seconds that the run was Queued."""
    changes = [json.loads(line) for line in events.read_text().splitlines()]
    at = {change["status"]: parse_utc(change["time_utc"]).timestamp() for change in reversed(changes)}
    return at["Preparing"] - at["Queued"] if {"Preparing", "Queued"} <= set(at) else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["local", "ssh", "slurm"])
    parser.add_argument("--lab-python", required=True, help="interpreter of an environment that has JupyterLab")
    given = parser.parse_args()
    lab = os.path.abspath(given.lab_python)
    sys.argv[sys.argv.index("--lab-python") + 1] = os.path.basename(lab)
    for name in given.names:
        if name in LACKS and (lack := LACKS[name]()):
            print(f"skipped {name}: this machine lacks {lack}")
            continue
        with place(name) as (words, environment, folder):
            (taken,) = in_turn(ROUNDS, lambda: answer_s([*words, "--python", lab], environment, folder))
        report(
            f"session_{name}",
            f"paceline dev to a kernel's first answer on {WHERE[name]}",
            f"at most {TARGETS[name]:g} s",
            median(taken) <= TARGETS[name],
            ours_s=median(taken),
            fastest_s=min(taken),
            rounds=ROUNDS,
        )


if __name__ == "__main__":
    main()
