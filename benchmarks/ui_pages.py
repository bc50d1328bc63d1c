"""The live page in headless Chromium: its start, a list, a run's page, a value until it is drawn, watchers, memory.

python benchmarks/ui_pages.py --peers peers        # makes environments for MLflow and TensorBoard there, of some 2 GB
python benchmarks/ui_pages.py                      # without the peers
python benchmarks/ui_pages.py large --peers peers  # only what many runs, metrics and points cost; a quarter of an hour
python benchmarks/ui_pages.py lists --peers peers  # of this only the lists of many runs
python benchmarks/ui_pages.py list --peers peers   # of this only the list of 10,000 runs
python benchmarks/ui_pages.py runs --peers peers   # of this only large runs and comparisons
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paceline as pl
from common import in_turn, median, program, report, scratch
from many_runs import make_runs
from paceline.runs.metrics import MetricLog
from serving import free_port

ROUNDS, RUNS, MANY_RUNS, POINTS, MANY_POINTS = 7, 1_000, 10_000, 1_000, 1_000_000
NAMES = ("loss", "accuracy", "lr")
MANY_NAMES = tuple(f"layer{number // 100}/weight_{number}" for number in range(12_000))
VALUES, WATCHERS, WATCHED_S = 60, 200, 20
PEERS = {"mlflow": "mlflow==3.17.2", "tensorboard": "tensorboard==2.21.0"}
#: Seconds that a page may take.
LIMIT_S = 60
_REST_MS = 1000
_BROWSER = ("--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-sync")
LIVE = """
import sys, time, paceline
run = paceline.Run.get_context()
for step in range(int(sys.argv[1])):
    run.log("loss", float(step), step=step)
    time.sleep(0.5)
"""


# --- what is looked at


def make_curves(names: tuple[str, ...], points: int) -> str:
    """The id of a run that has logged so many values of each."""
    run = pl.Experiment(pl.Workspace.from_config(), "curves").start_logging(outputs=False)
    log = MetricLog(run.folder.metric_log(0))
    for step in range(points):
        for number, name in enumerate(names):
            log.scalar(name, 1 / (1 + step + number), step)
    log.close()
    run.complete()
    return str(run.id)


# --- the two sides


@contextlib.contextmanager
def page_server() -> Iterator[tuple[str, int]]:
    """The page's own server: its link, and its pid."""
    process = subprocess.Popen([program("paceline"), "ui", "--port", "0", "--json"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = json.loads(process.stdout.readline())
    try:
        yield said["url"], said["pid"]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def peer_server(words: list[str], port: int) -> Iterator[float]:
    """Another's server, once it answers; the seconds that took."""
    before = time.perf_counter()
    # MLflow's background jobs start ten processes, which would take time from both sides.
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    process = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True, env=env
    )
    try:
        while not _answers(port):
            assert process.poll() is None, f"{words[0]} has ended"
            time.sleep(0.05)
        yield time.perf_counter() - before
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait()


def _answers(port: int) -> bool:
    import urllib.request

    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=2) as answer:
        return bool(answer.status == 200)
    return False


@dataclass(frozen=True)
class Visit:
    """Seconds until a page is there, and seconds of the processor: of the server, and of the browser's main thread."""

    seconds: float
    server_s: float
    browser_s: float


def visit(page: Any, url: str, is_there: str, pid: int | None = None) -> Visit:
    """Open a page in a browser at rest, and wait until this JavaScript holds on it. pid: of the server.

    A browser keeps one process ready for the next page: without the rest, a page that comes after a quick one would pay for its
    start.
    """
    page.goto("about:blank")
    page.wait_for_timeout(_REST_MS)
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    before, spent = time.perf_counter(), cpu_s(pid) if pid else 0.0
    page.goto(url, wait_until="commit")
    page.wait_for_function(is_there, polling=10, timeout=1000 * LIMIT_S)
    took, spent = time.perf_counter() - before, (cpu_s(pid) if pid else 0.0) - spent
    metrics = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    session.detach()
    return Visit(took, spent, metrics["TaskDuration"])


def seconds_to(page: Any, url: str, is_there: str) -> float:
    return visit(page, url, is_there).seconds


def spent_s(name: str, visits: Sequence[Visit]) -> dict[str, float]:
    """The medians of the processor's seconds, for a result."""
    return {
        f"{name}_server_cpu_s": median([one.server_s for one in visits]),
        f"{name}_browser_cpu_s": median([one.browser_s for one in visits]),
    }


def drawn(names: tuple[str, ...], points: int) -> str:
    return f"() => {json.dumps(names)}.every(name => window.pacelineDrawn?.[name]?.n === {points})"


def rows(least: int) -> str:
    """So many runs are listed, and on the screen: the page has them before it is painted."""
    painted = "performance.getEntriesByName('first-contentful-paint').length > 0"
    return f"() => document.querySelectorAll('#rows tr').length >= {least} && {painted}"


def memory_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise AssertionError("Linux tells it")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- the measures


def start_s() -> float:
    before = time.perf_counter()
    with page_server() as (url, _):
        import urllib.request

        with urllib.request.urlopen(url.partition("?")[0] + "static/0/ui.css") as answer:
            answer.read()
        return time.perf_counter() - before


def bytes_of(page: Any, context: Any, url: str, is_there: str) -> float:
    """KiB that come over the network for a page that the browser has never seen, compressed as they are."""
    session = context.new_cdp_session(page)
    session.send("Network.enable")
    session.send("Network.clearBrowserCache")
    received: list[float] = []
    session.on("Network.loadingFinished", lambda event: received.append(event["encodedDataLength"]))
    seconds_to(page, url, is_there)
    session.detach()
    return sum(received) / 1024


def until_drawn(page: Any, base: str, folder: Path) -> list[float]:
    """Seconds from `log` to the screen, of each value."""
    (folder / "live").mkdir()
    (folder / "live" / "live.py").write_text(LIVE)
    estimator = pl.Estimator(source_directory=folder / "live", entry_script="live.py", arguments=[str(VALUES)])
    run = pl.Experiment(pl.Workspace.from_config(), "live").submit(estimator)
    while not run.folder.metric_log(0).exists():
        time.sleep(0.01)
    page.goto(f"{base}/runs/{run.id}")
    page.evaluate(
        "() => { window.seen = {}; "
        "setInterval(() => { const d = window.pacelineDrawn?.loss; if (d) seen[d.last] ??= d.at; }, 4); }"
    )
    run.wait_for_completion()
    page.wait_for_function(f"() => {VALUES - 1} in window.seen", timeout=60_000)
    seen = {float(value): at / 1000 for value, at in page.evaluate("() => window.seen").items()}
    logged = dict(zip(run.metrics("loss").values, run.metrics("loss").times, strict=True))
    # Those that were there when the page was opened say nothing.
    return sorted(seen[value] - logged[value] for value in list(seen)[2:])


async def _watch(port: int, cookie: str, path: str, until: asyncio.Event) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nCookie: {cookie}\r\n\r\n".encode())
    reading = asyncio.create_task(reader.read(-1))
    await until.wait()
    reading.cancel()
    writer.close()


async def _watched(port: int, cookie: str, path: str, pid: int) -> float:
    until = asyncio.Event()
    watchers = [asyncio.create_task(_watch(port, cookie, path, until)) for _ in range(WATCHERS)]
    await asyncio.sleep(5)
    before, began = cpu_s(pid), time.monotonic()
    await asyncio.sleep(WATCHED_S)
    share = (cpu_s(pid) - before) / (time.monotonic() - began)
    until.set()
    await asyncio.gather(*watchers)
    return share


def watchers_share(context: Any, url: str, pid: int, folder: Path) -> float:
    """Of a core that the server takes while so many watch one run that logs twice a second."""
    estimator = pl.Estimator(source_directory=folder / "live", entry_script="live.py", arguments=["80"])
    run = pl.Experiment(pl.Workspace.from_config(), "live").submit(estimator)
    while not run.folder.metric_log(0).exists():
        time.sleep(0.01)
    cookie = "; ".join(f"{one['name']}={one['value']}" for one in context.cookies())
    port = int(url.split(":")[2].partition("/")[0])
    # In a thread, for the browser's driver has this one's event loop.
    with ThreadPoolExecutor(1) as pool:
        share = pool.submit(asyncio.run, _watched(port, cookie, f"/runs/{run.id}/live", pid)).result()
    run.cancel()
    run.wait_for_completion()
    return share


# --- others


def environment(top: Path, name: str) -> Path:
    """The folder of programs of a peer's own environment, made on first use."""
    folder = top / name
    if not (folder / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", PEERS[name]], check=True)
        (folder / "ready").touch()
    return folder / "bin"


@contextlib.contextmanager
def mlflow_list(bin_dir: Path, folder: Path) -> Iterator[tuple[float, str, str]]:
    """Seconds to MLflow's start, the address of its list of as many runs, and what holds once that is there."""
    store = f"sqlite:///{folder}/mlflow.db"
    fill = (
        "import sys, mlflow\nmlflow.set_tracking_uri(sys.argv[1])\nmlflow.set_experiment('many')\n"
        f"for n in range({RUNS}):\n    with mlflow.start_run(): mlflow.log_metric('loss', 0.1)\n"
    )
    subprocess.run([str(bin_dir / "python"), "-c", fill, store], check=True, stderr=subprocess.DEVNULL)
    port = free_port()
    words = [str(bin_dir / "mlflow"), "ui", "--backend-store-uri", store, "--port", str(port)]
    with peer_server(words, port) as took:
        # An experiment's own address leads to its overview, where no run is listed.
        url = f"http://127.0.0.1:{port}/#/experiments/1/runs?workflowType=machine_learning"
        yield took, url, "() => document.querySelectorAll('[role=row]').length > 20"


@contextlib.contextmanager
def tensorboard_run(bin_dir: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """The address of TensorBoard's page of the same three curves, and what holds once they are drawn."""
    fill = (
        "import sys\nfrom tensorboard.summary.writer.event_file_writer import EventFileWriter\n"
        "from tensorboard.compat.proto.event_pb2 import Event\nfrom tensorboard.compat.proto.summary_pb2 import Summary\n"
        f"w = EventFileWriter(sys.argv[1])\nfor step in range({POINTS}):\n    for n, name in enumerate({NAMES!r}):\n"
        "        v = Summary.Value(tag=name, simple_value=1 / (1 + step + n))\n"
        "        w.add_event(Event(wall_time=1.7e9 + step, step=step, summary=Summary(value=[v])))\nw.close()\n"
    )
    logs = folder / "events" / "run"
    subprocess.run([str(bin_dir / "python"), "-c", fill, str(logs)], check=True, stderr=subprocess.DEVNULL)
    port = free_port()
    with peer_server([str(bin_dir / "tensorboard"), "--logdir", str(folder / "events"), "--port", str(port)], port):
        there = "() => document.querySelectorAll('line-chart canvas, line-chart svg path').length >= 3"
        yield f"http://127.0.0.1:{port}/#timeseries", there


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peers", type=Path, help="folder for the environments of MLflow and TensorBoard")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--large-rounds", type=int, default=ROUNDS)
    parser.add_argument("parts", nargs="*", help="small, large, lists, list, runs; default: all")
    given = parser.parse_args()
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium")
    assert chromium, "apt-get install chromium"
    with scratch() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=_BROWSER)
        context = browser.new_context(viewport={"width": 1400, "height": 900})
        page = context.new_page()
        if not given.parts or "small" in given.parts:
            measure(page, context, folder, given)
        if given.parts != ["small"]:
            import ui_large

            ui_large.measure(page, context, folder, given)
        browser.close()


def measure(page: Any, context: Any, folder: Path, given: argparse.Namespace) -> None:
    make_runs(folder, RUNS)
    small, large = make_curves(NAMES, POINTS), make_curves(("loss",), MANY_POINTS)
    wide = make_curves(MANY_NAMES, 10)
    (starts,) = in_turn(given.rounds, start_s)
    mlflow_start: float | None = None
    with page_server() as (url, pid):
        base = url.partition("/?")[0]
        page.goto(url)
        # What is opened, one after the other in each round. A picture is what a page costs the browser that has nothing on it.
        sides = {
            "empty": (f"{base}/static/0/icon.svg", "() => true"),
            "list": (f"{base}/", rows(100)),
            "run": (f"{base}/runs/{small}", drawn(NAMES, POINTS)),
        }
        with contextlib.ExitStack() as peers:
            if given.peers:
                top = given.peers.absolute()
                mlflow_start, *mlflow = peers.enter_context(mlflow_list(environment(top, "mlflow"), folder))
                sides["mlflow"] = (mlflow[0], mlflow[1])
                sides["tensorboard"] = peers.enter_context(tensorboard_run(environment(top, "tensorboard"), folder))
            calls = [lambda side=side: seconds_to(page, *side) for side in sides.values()]
            figures = in_turn(given.rounds, *calls)
        seconds = {name: median(figure) for name, figure in zip(sides, figures, strict=True)}
        sent_kib = bytes_of(page, context, f"{base}/runs/{small}", drawn(NAMES, POINTS))
        delays = until_drawn(page, base, folder)
        share = watchers_share(context, url, pid, folder)
    firsts, wides = [], []
    for _ in range(given.rounds):
        # A server that has never read the run: afterwards its numbers are there.
        for figures, run, is_there in (
            (firsts, large, drawn(("loss",), MANY_POINTS)),
            (wides, wide, drawn(MANY_NAMES[:1], 10)),
        ):
            with page_server() as (url, _):
                page.goto(url)
                figures.append(seconds_to(page, f"{url.partition('/?')[0]}/runs/{run}", is_there))
    make_runs(folder, MANY_RUNS)
    with page_server() as (url, pid):
        page.goto(url)
        page.wait_for_function(
            f"() => Number(document.getElementById('total').textContent) >= {MANY_RUNS}", timeout=60_000
        )
        many_s = seconds_to(page, url.partition("/?")[0] + "/", rows(100))
        mib = memory_mib(pid)
    start, listed, opened, million = median(starts), seconds["list"], seconds["run"], median(firsts)
    first_of_many = median(wides)
    mlflow_s, tensorboard_s = seconds.get("mlflow"), seconds.get("tensorboard")
    times_mlflow = mlflow_s / listed if mlflow_s else None
    times_tensorboard = tensorboard_s / opened if tensorboard_s else None
    p95 = delays[int(0.95 * len(delays))]
    told = {"empty_page_s": seconds["empty"], "rounds": given.rounds}
    report(
        "ui_list",
        f"paceline ui: start, and a list of {RUNS:,} runs",
        "at most 1 s; at most 0.5 s, 20 times as fast as MLflow's UI",
        start <= 1 and listed <= 0.5 and (times_mlflow is None or times_mlflow >= 20),
        **{"start_s": start, "list_s": listed, "list_of_10000_s": many_s, **told},
        **({"mlflow_start_s": mlflow_start, "mlflow_s": mlflow_s, "times_mlflow": times_mlflow} if mlflow_s else {}),
    )
    report(
        "ui_run",
        f"a run's page with 3 x {POINTS:,} points, with {MANY_POINTS:,}, and the first chart of {len(MANY_NAMES):,}",
        "at most 0.4 s and 150 KiB, 5 times as fast as TensorBoard; at most 1 s; at most 1 s",
        opened <= 0.4
        and sent_kib <= 150
        and million <= 1
        and first_of_many <= 1
        and (times_tensorboard is None or times_tensorboard >= 5),
        **{"page_s": opened, "sent_kib": sent_kib, "million_s": million, "first_of_12000_s": first_of_many, **told},
        **({"tensorboard_s": tensorboard_s, "times_tensorboard": times_tensorboard} if tensorboard_s else {}),
    )
    report(
        "ui_live",
        f"a value logged until it is drawn, and {WATCHERS} watchers of one run",
        "at most 0.3 s (p95); under 10 % of a core",
        p95 <= 0.3 and share < 0.1,
        **{"median_s": median(delays), "p95_s": p95, "longest_s": delays[-1], "share_of_a_core": share},
    )
    report("ui_memory", f"memory with {MANY_RUNS:,} runs", "at most 80 MiB", mib <= 80, peak_mib=mib)


if __name__ == "__main__":
    main()
