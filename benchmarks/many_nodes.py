"""The reference architecture on two nodes: examples/many_nodes on two SSH hosts, its data on a web server.

    staging      bytes that the server gave, and the time of preparing, the first time and the second; two workers a node
    step         one worker on one node, and one on each of two, with as many rows for each worker
    checkpoint   its size, and how long a save holds the training, beside the time from one save to the next
    restart      from the death of a worker until the run has logged a step that it had not done before; steps done twice
    monitoring   what a node and a worker write of themselves in an hour

The hosts are network namespaces of this machine, as in the tests, each with a /tmp and a cache of its own; they share one folder,
in which workspace and checkpoints lie.
"""

from __future__ import annotations

import http.server
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from common import program, report

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.engines.hosts import Hosts

from paceline.system import processes

MIB, SHARDS = 256, 16
EXAMPLE = Path(__file__).parents[1] / "examples" / "many_nodes"
LIMIT_S = 300.0


class Served(http.server.SimpleHTTPRequestHandler):
    """A folder, with a count of the bytes that were asked for."""

    count = 0
    lock = threading.Lock()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        begin = source.tell() if source.seekable() else 0
        super().copyfile(source, outputfile)
        with self.lock:
            Served.count += source.tell() - begin

    def log_message(self, *_: Any) -> None:
        pass


class Bench:
    """The hosts with a target `there`, and what is run on them."""

    def __init__(self, hosts: Hosts) -> None:
        self.folder = hosts.folder / "bench"
        (self.folder / "source").mkdir(parents=True)
        shutil.copy(EXAMPLE / "train.py", self.folder / "source")
        self.environment = {**os.environ, "PACELINE_WORKSPACE": str(self.folder / "ws")}
        self.environment["PATH"] = hosts.ssh_environment()["PATH"]
        self.call("compute", "add", "there", "--kind", "ssh", "--hosts", ",".join(hosts.names))

    def call(self, *words: str) -> str:
        done = subprocess.run(
            [program("paceline"), *words], env=self.environment, check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, topology: str, checkpoints: str, *arguments: str, options: tuple[str, ...] = ()) -> Path:
        """The folder of a run of the example that has been submitted."""
        folder = self.folder / "checkpoints" / checkpoints
        folder.mkdir(parents=True, exist_ok=True)
        words = ["submit", "--json", str(self.folder / "source" / "train.py"), "--compute", "there", "-j", topology]
        words += ["--python", sys.executable, "--env", "OMP_NUM_THREADS=1", *options]
        words += [] if topology == "1" else ["--backend", "gloo"]
        words += ["--input", "characters=web:characters/*.npy,download", "--"]
        words += ["--data", "$PACELINE_INPUT_characters", "--checkpoints", str(folder), *arguments]
        return self.folder / "ws" / "runs" / json.loads(self.call(*words))["run_id"]

    def finish(self, *words: str, **options: Any) -> Path:
        """The folder of a run that has ended well."""
        run = self.submit(*words, **options)
        until(lambda: status(run) in ("Completed", "Failed", "Canceled"))
        assert status(run) == "Completed", self.call("show", run.name)
        return run


def until(condition: Any) -> float:
    """The time at which this came true."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return time.time()


def status(run: Path) -> str:
    return str(json.loads((run / "state.json").read_text())["status"])


def seconds_of(run: Path, state: str) -> float:
    """How long a run was in this state."""
    import datetime as dt

    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    times = [dt.datetime.fromisoformat(event["time_utc"].replace("Z", "+00:00")).timestamp() for event in events]
    number = next(number for number, event in enumerate(events) if event["status"] == state)
    return times[number + 1] - times[number]


def logged(run: Path, name: str) -> list[tuple[int, float, float]]:
    """Step, value and time of each value of a metric, of all attempts."""
    from paceline import Workspace

    found = Workspace(run.parents[1]).get_run(run.name)
    series = [found.metrics(name, attempt=attempt.number) for attempt in found.record().attempts]
    return [value for one in series[-1:] for value in zip(one.steps, one.values, one.times, strict=True)]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def staging(bench: Bench) -> dict[str, float]:
    """Two workers on each node; the second run finds what the first has fetched."""
    found: dict[str, float] = {}
    for name in ("cold", "warm"):
        Served.count = 0
        run = bench.finish("2x2", name, "--steps", "1", "--width", "16", "--depth", "1")
        found |= {f"{name}_s": seconds_of(run, "Preparing"), f"{name}_mib": Served.count / 2**20}
    return found


def step_ms(bench: Bench, topology: str, rows: int, checkpoints: str) -> tuple[float, Path]:
    """A step, the first ten left out, which begin with a comparison."""
    run = bench.finish(topology, checkpoints, "--steps", "120", "--save-every", "40", "--batch-size", str(rows))
    times = {step: at for step, _, at in logged(run, "loss")}
    pairs = [(times[step] - times[step - 10]) / 10 for step in sorted(times) if step - 10 in times]
    return 1000 * statistics.median(pairs), run


def restart(bench: Bench) -> dict[str, float]:
    """A worker is killed, in the middle between two checkpoints."""
    words = ("--steps", "200", "--save-every", "40", "--batch-size", "32")
    run = bench.submit("2x1", "restart", *words, options=("--max-restarts", "1"))
    metrics = run / "metrics" / "rank_0.jsonl"
    until(lambda: metrics.exists() and '"step": 60' in metrics.read_text().replace('"step":60', '"step": 60'))
    workers = [
        pid
        for pid in processes.with_variable("PACELINE_RUN_ID", run.name)
        if processes.environment_of(pid).get("RANK") == "1"
    ]
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    died = time.time()
    until(lambda: status(run) in ("Completed", "Failed"))
    assert status(run) == "Completed", bench.call("show", run.name)
    of_second = sorted(metrics.parent.glob("rank_0.2.jsonl"))
    assert of_second, "the worker's death was not noticed"
    from paceline import Workspace

    found = Workspace(run.parents[1]).get_run(run.name)
    first, second = (found.metrics("loss", attempt=number) for number in (1, 2))
    reached = max(step for step in first.steps if step is not None)
    fresh = next(at for step, at in zip(second.steps, second.times, strict=True) if step is not None and step > reached)
    text = (run / "logs" / "rank_0.log").read_text()
    begun = int(text.partition("begin with step ")[2].partition(" ")[0])
    return {"restart_s": fresh - died, "steps_twice": reached - begun}


def main() -> None:
    with Hosts("pq", private=("/tmp",), environment={"PACELINE_DATA_CACHE": "/tmp/cache"}).up(2) as hosts:
        bench = Bench(hosts)
        web = bench.folder / "web"
        store = {**bench.environment, "PACELINE_WORKSPACE": str(bench.folder / "other")}
        command = [sys.executable, str(EXAMPLE / "prepare.py"), "--mib", str(MIB), "--shards", str(SHARDS)]
        subprocess.run(command, env=store, check=True, capture_output=True)
        shutil.move(str(bench.folder / "other" / "data"), web)
        server = http.server.ThreadingHTTPServer((hosts.own_address, 0), partial(Served, directory=str(web)))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        bench.call("data", "add", "web", f"http://{hosts.own_address}:{server.server_address[1]}")

        figures = {"data_mib": float(MIB)} | staging(bench)
        one, _ = step_ms(bench, "1", 16, "one")
        two, run = step_ms(bench, "2x1", 32, "two")
        saves = [value for _, value, _ in logged(run, "save_s")]
        newest = max((bench.folder / "checkpoints" / "two").iterdir(), key=lambda path: path.stat().st_mtime)
        figures |= {"one_node_ms": one, "two_nodes_ms": two, "of_twice": one / two}
        figures |= {"checkpoint_mib": size_of(newest) / 2**20, "held_ms": 1000 * statistics.median(saves)}
        hours = seconds_of(run, "Running") / 3600
        node, worker = size_of_files(run, "metrics/node_*"), size_of_files(run, "metrics/rank_*", "logs/rank_*")
        figures |= {"node_kib_h": node / 2 / 1024 / hours, "run_kib_h": worker / 1024 / hours}
        figures |= restart(bench)
        server.shutdown()
    met = round(figures["cold_mib"]) == 2 * MIB and figures["warm_mib"] < 1 and figures["restart_s"] <= 30
    report(
        "many_nodes",
        "the reference architecture on 2 ssh hosts: staging, step, checkpoint, restart, monitoring",
        "each node fetches the data once; a restart goes on within 30 s",
        met,
        **figures,
    )


def size_of_files(run: Path, *patterns: str) -> int:
    return sum(path.stat().st_size for pattern in patterns for path in run.glob(pattern) if not path.is_symlink())


if __name__ == "__main__":
    main()
