"""From the shell to the first answer; an update and an end under load; a killed worker.

python benchmarks/serve_start.py
"""

from __future__ import annotations

import argparse
import collections
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from common import in_turn, median, program, report, scratch
from serving import answered, configured, free_port, process

ROUNDS, LOAD_S = 9, 30
FIT = """
import joblib, sys
from sklearn.linear_model import LogisticRegression
joblib.dump(LogisticRegression().fit([[0.0, 0.0], [1.0, 1.0]], [0, 1]), sys.argv[1])
"""
VERSIONED = "import os\ndef init(): pass\ndef run(data): return os.environ['VERSION']\n"


def first_answer(folder: Path, model: Path) -> float:
    """Seconds from the start of `paceline serve` to its first answer."""
    port = free_port()
    before = time.perf_counter()
    with process([program("paceline"), "serve", str(model), "--port", str(port)], folder):
        answered(f"http://127.0.0.1:{port}/score", "[[1, 1]]")
        return time.perf_counter() - before


def import_time() -> float:
    before = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import sklearn.linear_model, joblib"], check=True)
    return time.perf_counter() - before


class Clients:
    """32 clients, each on a connection that it keeps. outcomes: of requests that a connection was made for."""

    def __init__(self, port: int) -> None:
        self.outcomes: collections.Counter[object] = collections.Counter()
        self.failed_at: list[float] = []
        self._port, self._over = port, threading.Event()
        self._threads = [threading.Thread(target=self._call) for _ in range(32)]
        for each in self._threads:
            each.start()

    def _call(self) -> None:
        made = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while not self._over.is_set():
            if made.sock is None:
                try:
                    made.connect()
                except OSError:
                    return
            try:
                made.request("POST", "/score", b"1")
                answer = made.getresponse()
                answer.read()
                self.outcomes[answer.status] += 1
                if answer.status >= 500:
                    self.failed_at.append(time.perf_counter())
            except (OSError, http.client.HTTPException) as error:
                self.outcomes[type(error).__name__] += 1
                made.close()
        made.close()

    @property
    def lost(self) -> int:
        return sum(count for outcome, count in self.outcomes.items() if outcome != 200)

    def end(self) -> None:
        self._over.set()
        for each in self._threads:
            each.join()


def state_of(folder: Path) -> dict:
    try:
        return json.loads((folder / "server.json").read_text())
    except (OSError, ValueError):
        return {}


def update_and_end(folder: Path, seconds: float) -> tuple[int, int, int]:
    """(requests, lost during updates for so long, lost during SIGTERM) under 32 clients."""
    port = free_port()
    command = configured(folder, VERSIONED, port=port, revision="0", environment={"VERSION": "0"})
    with process(command, folder) as server:
        answered(f"http://127.0.0.1:{port}/score", "1")
        clients = Clients(port)
        until, number = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            number += 1
            configured(folder, VERSIONED, port=port, revision=str(number), environment={"VERSION": str(number)})
            server.send_signal(signal.SIGHUP)
            while state_of(folder).get("revision") != str(number):
                time.sleep(0.01)
            time.sleep(1)
        updating = clients.lost
        server.send_signal(signal.SIGTERM)
        server.wait()
        clients.end()
        return sum(clients.outcomes.values()), updating, clients.lost - updating


def killed(folder: Path) -> tuple[float, int, int]:
    """(seconds from SIGKILL of the one worker to the next answer, requests that failed with 5xx, others lost)."""
    port = free_port()
    with process(configured(folder, VERSIONED, port=port, environment={"VERSION": "1"}), folder):
        answered(f"http://127.0.0.1:{port}/score", "1")
        clients = Clients(port)
        time.sleep(1)
        (worker,) = state_of(folder)["workers"]
        os.kill(worker["pid"], signal.SIGKILL)
        before = time.perf_counter()
        while state_of(folder)["workers"] == [worker]:
            time.sleep(0.005)
        answered(f"http://127.0.0.1:{port}/score", "1")
        took = time.perf_counter() - before
        clients.end()
        return took, clients.outcomes[502], clients.lost - clients.outcomes[502]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seconds", type=float, default=LOAD_S)
    asked = parser.parse_args()
    with scratch() as folder:
        model = folder / "model.joblib"
        subprocess.run([sys.executable, "-c", FIT, str(model)], check=True)
        serve_s, import_s = in_turn(asked.rounds, lambda: first_answer(folder / "start", model), import_time)
        more = median(serve_s) - median(import_s)
        report(
            "serve_start",
            "paceline serve to the first answer, scikit-learn model, over importing scikit-learn",
            "at most 1 s more",
            more <= 1,
            serve_s=median(serve_s),
            import_s=median(import_s),
            more_s=more,
        )
        requests, updating, ending = update_and_end(folder / "update", asked.seconds)
        report(
            "serve_update",
            f"updates to new models under 32 clients for {asked.seconds:g} s, then SIGTERM",
            "0 requests lost by updates",
            updating == 0,
            requests=requests,
            lost_by_updates=updating,
            lost_by_sigterm=ending,
        )
        took, failed, others = killed(folder / "killed")
        report(
            "serve_killed",
            "a worker killed under 32 clients, to the next answer",
            "at most 2 s; only what it had in hand fails, with 5xx",
            took <= 2 and failed <= 1 and others == 0,
            next_answer_s=took,
            answered_5xx=failed,
            lost=others,
        )


if __name__ == "__main__":
    main()
