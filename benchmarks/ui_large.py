"""The live page with 10,000 and 100,000 runs, 12,000 metrics, 1,000,000 points and 100 compared runs, beside MLflow's."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sqlite3
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import paceline as pl
from common import in_turn, median, report
from many_runs import METRICS, make_runs
from serving import free_port
from ui_pages import (
    LIMIT_S,
    MANY_NAMES,
    MANY_POINTS,
    Visit,
    bytes_of,
    cpu_s,
    drawn,
    environment,
    make_curves,
    memory_mib,
    page_server,
    peer_server,
    rows,
    seconds_to,
    spent_s,
    visit,
)

SOME, MANY, COMPARED = 10_000, 100_000, 100
QUERY = 'metrics.loss < 0.01 and params.lr = 0.03 and tags.team = "team3"'
MLFLOW_QUERY = "metrics.loss < 0.01 and params.lr = '0.03' and tags.team = 'team3'"
#: Times that Paceline's page has to be faster than MLflow's.
TIMES = 10
_FILL = """
import sys, mlflow
mlflow.set_tracking_uri(sys.argv[1])
mlflow.set_experiment("many")
mlflow.start_run()
"""


class MlflowStore:
    """MLflow's SQLite store, filled by SQL as its own API would fill it, which would take an hour."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.uri = f"sqlite:///{folder}/large.db"
        subprocess.run([str(python), "-c", _FILL, self.uri], check=True, stderr=subprocess.DEVNULL, cwd=folder)
        self._path, self._count = folder / "large.db", 0

    def add(self, count: int, names: tuple[str, ...] = METRICS, steps: int = 4) -> list[str]:
        """Add runs with the metrics, parameters and tags of `make_runs`, and return their ids."""
        connection = sqlite3.connect(self._path)
        first = 1_700_000_000_000
        ids = [f"{number:032x}" for number in range(self._count + 1, self._count + 1 + count)]
        for run_id in ids:
            number = int(run_id, 16)
            at, best = first + 60_000 * number, (number * 7919 % 1000) / 1000
            connection.execute(
                "insert into runs values (?, ?, 'UNKNOWN', '', '', 'root', 'FINISHED', ?, ?, '', 'active', ?, 1, null)",
                (run_id, f"run {number}", at, at + 60_000, f"/nowhere/{run_id}/artifacts"),
            )
            for place, name in enumerate(names):
                values = [best / (1 + place % 9 + step) for step in range(steps)]
                connection.executemany(
                    "insert into metrics values (?, ?, ?, ?, ?, 0)",
                    [(name, value, at + step, run_id, step) for step, value in enumerate(values)],
                )
                connection.execute(
                    "insert into latest_metrics values (?, ?, ?, ?, 0, ?)",
                    (name, values[-1], at + steps - 1, steps - 1, run_id),
                )
            params = (("lr", ("0.1", "0.03", "0.01")[number % 3]), ("seed", str(number % 1000)))
            tags = (("mlflow.runName", f"run {number}"), ("mlflow.user", "root"), ("team", f"team{number % 20}"))
            connection.executemany("insert into params values (?, ?, ?)", [(*one, run_id) for one in params])
            connection.executemany("insert into tags values (?, ?, ?)", [(*one, run_id) for one in tags])
        connection.commit()
        connection.close()
        self._count += count
        return ids


@contextlib.contextmanager
def mlflow_page(store: MlflowStore | None, bin_dir: Path | None) -> Iterator[str | None]:
    """Start MLflow's page, and yield its address, or None without MLflow."""
    if store is None or bin_dir is None:
        yield None
        return
    port = free_port()
    with peer_server([str(bin_dir / "mlflow"), "ui", "--backend-store-uri", store.uri, "--port", str(port)], port):
        yield f"http://127.0.0.1:{port}"


def first_list(page: Any, url: str) -> float:
    """Seconds until a new server's list has all runs with their metrics."""
    page.set_default_timeout(300_000)
    before = time.perf_counter()
    page.goto(url)
    while page.locator("p.note", has_text="for the first time").count() or not page.locator("#rows tr").count():
        page.wait_for_timeout(1000)
        page.reload()
    return time.perf_counter() - before


def fetch(page: Any, request: urllib.request.Request) -> float:
    """Seconds of a request, with the browser at rest."""
    page.goto("about:blank")
    page.wait_for_timeout(1000)
    before = time.perf_counter()
    with urllib.request.urlopen(request, timeout=120) as answer:
        answer.read()
    return time.perf_counter() - before


def measured(page: Any, given: argparse.Namespace, sides: dict[str, tuple[str, str]], **others: Any) -> dict[str, Any]:
    """Return the median seconds of each side, measured in turn."""
    calls: dict[str, Callable[[], float]] = {
        name: (lambda side=side: _at_most(page, *side)) for name, side in sides.items()
    }
    calls |= others
    figures = in_turn(given.large_rounds, *calls.values())
    return {f"{name}_s": median(figure) for name, figure in zip(calls, figures, strict=True)}


def _at_most(page: Any, url: str, is_there: str) -> float:
    """Return the seconds until a page is there, or the limit: MLflow's list of 100,000 runs may not come at all."""
    from playwright.sync_api import TimeoutError as Late

    try:
        return seconds_to(page, url, is_there)
    except Late:
        return float(LIMIT_S)


def times(found: dict[str, Any], ours: str, theirs: str) -> float | None:
    return found[f"{theirs}_s"] / found[f"{ours}_s"] if f"{theirs}_s" in found else None


def measure(page: Any, context: Any, folder: Path, given: argparse.Namespace) -> None:
    os.environ["XDG_STATE_HOME"] = str(folder / "state")
    load = {"load": round(os.getloadavg()[0], 1), "rounds": given.large_rounds}
    bin_dir = environment(given.peers.absolute(), "mlflow") if given.peers else None
    store = MlflowStore(bin_dir / "python", folder) if bin_dir else None
    lists = () if "runs" in given.parts else ((SOME, 0.1), (MANY, 0.2))
    lists = lists[:1] if "list" in given.parts else lists
    for count, most_s in lists:
        there = len(make_runs(folder, count))
        if store:
            store.add(there)
        many_runs(page, given, count, most_s, store, bin_dir, load)
    if {"list", "lists"} & {*given.parts}:
        return
    make_runs(folder, 3)
    wide, million = make_curves(MANY_NAMES, 10), make_curves(("loss",), MANY_POINTS)
    few = tuple(METRICS) + tuple(f"layer0/weight_{number}" for number in range(7))
    there = len(list(pl.Workspace.from_config().runs_dir.iterdir()))
    compared = make_runs(folder, there + COMPARED, metrics=len(few), steps=100)
    theirs = [store.add(1, MANY_NAMES, 10)[0], store.add(1, ("loss",), MANY_POINTS)[0]] if store else []
    their_compared = store.add(COMPARED, few, 100) if store else []
    # The page draws large curves in pieces, as the server reads them: a first chart has some of its values.
    looks = {
        "wide": (wide, f"() => window.pacelineDrawn?.[{json.dumps(MANY_NAMES[0])}]?.n > 0"),
        "wide_whole": (wide, drawn(MANY_NAMES[:1], 10)),
        "million": (million, "() => window.pacelineDrawn?.loss?.n > 0"),
        "million_whole": (million, drawn(("loss",), MANY_POINTS)),
    }
    firsts: dict[str, list[Visit]] = {name: [] for name in looks}
    for _ in range(given.large_rounds):
        for name, (run, is_there) in looks.items():
            # A server that has never read the run: afterwards its numbers are in memory.
            with page_server() as (url, pid):
                page.goto(url)
                firsts[name].append(visit(page, f"{url.partition('/?')[0]}/runs/{run}", is_there, pid))
    with page_server() as (url, pid), mlflow_page(store, bin_dir) as mlflow:
        base = url.partition("/?")[0]
        first_list(page, url)
        curves = "window.pacelineDrawn?.loss && document.querySelectorAll('#table tbody tr').length > 3"
        compare = f"{base}/compare?{urlencode([('run', run_id) for run_id in compared])}"
        sides = {"empty": (f"{base}/static/0/icon.svg", "() => true"), "compare": (compare, f"() => {curves}")}
        if mlflow:
            plots = "() => document.querySelectorAll('svg.main-svg').length > 0"
            for name, run in zip(("wide", "million"), theirs, strict=True):
                sides[f"mlflow_{name}"] = (f"{mlflow}/#/experiments/1/runs/{run}/model-metrics", plots)
            ids = urlencode({"runs": json.dumps(their_compared), "experiments": '["1"]'})
            sides["mlflow_compare"] = (f"{mlflow}/#/compare-runs?{ids}", plots)
        found = measured(page, given, sides)
        firsts["compare"] = [visit(page, *sides["compare"], pid) for _ in range(given.large_rounds)]
        sent = {
            name: bytes_of(page, context, address, is_there)
            for name, address, is_there in (
                ("list", f"{base}/", rows(100)),
                ("run", f"{base}/runs/{wide}", looks["wide"][1]),
                ("compare", compare, f"() => {curves}"),
            )
        }
    found |= {
        f"{name}_s": median([one.seconds for one in visits]) for name, visits in firsts.items() if name != "compare"
    }
    for name, label, most_s in (
        ("wide", f"the first chart of a run with {len(MANY_NAMES):,} metrics", 1.0),
        ("million", f"the first chart of a run with {MANY_POINTS:,} points", 1.5),
        ("compare", f"the table and first curves of {COMPARED} compared runs", 1.0),
    ):
        ratio = times(found, name, f"mlflow_{name}")
        keys = (f"{name}_s", f"{name}_whole_s", f"mlflow_{name}_s", "empty_s")
        figures = {key: found[key] for key in keys if key in found}
        report(
            f"ui_{name}",
            label,
            f"at most {most_s:g} s, and {TIMES} times as fast as MLflow's page",
            found[f"{name}_s"] <= most_s and (ratio is None or ratio >= TIMES),
            **figures,
            **spent_s(name, firsts[name]),
            **({"times_mlflow": ratio} if ratio else {}),
            **load,
        )
    report(
        "ui_sent",
        f"KiB of the first load: list of {MANY:,} runs, run with {len(MANY_NAMES):,} metrics, {COMPARED} compared runs",
        "at most 350 KB each",
        all(kib * 1.024 <= 350 for kib in sent.values()),
        **{f"{name}_kib": kib for name, kib in sent.items()},
    )


def many_runs(
    page: Any,
    given: argparse.Namespace,
    count: int,
    most_s: float,
    store: MlflowStore | None,
    bin_dir: Path | None,
    load: dict[str, Any],
) -> None:
    """Report the list of so many runs, and a query."""
    with page_server() as (url, pid):
        cold_s, cold_cpu_s, cold_mib = first_list(page, url), cpu_s(pid), memory_mib(pid)
    with page_server() as (url, pid), mlflow_page(store, bin_dir) as mlflow:
        base = url.partition("/?")[0]
        warm_s = first_list(page, url)
        sides = {"empty": (f"{base}/static/0/icon.svg", "() => true"), "list": (f"{base}/", rows(100))}
        cookie = "; ".join(f"{one['name']}={one['value']}" for one in page.context.cookies(base))
        asked = urllib.request.Request(f"{base}/?{urlencode({'q': QUERY})}", headers={"cookie": cookie})
        queries = {"query": lambda: fetch(page, asked)}
        if mlflow:
            there = "() => document.querySelectorAll('[role=row]').length > 20"
            sides["mlflow"] = (f"{mlflow}/#/experiments/1/runs?workflowType=machine_learning", there)
            wanted = {"experiment_ids": ["1"], "filter": MLFLOW_QUERY, "max_results": 100}
            theirs = urllib.request.Request(
                f"{mlflow}/api/2.0/mlflow/runs/search",
                json.dumps(wanted).encode(),
                {"content-type": "application/json"},
            )
            queries["mlflow_query"] = lambda: fetch(page, theirs)
        found = measured(page, given, sides, **queries)
        visits = [visit(page, *sides["list"], pid) for _ in range(given.large_rounds)]
        mib = memory_mib(pid)
    over, ratio, query_ratio = (
        found["list_s"] - found["empty_s"],
        times(found, "list", "mlflow"),
        times(found, "query", "mlflow_query"),
    )
    report(
        f"ui_list_{count}",
        f"list of {count:,} runs, and a query of metrics, params and tags",
        f"at most {most_s:g} s over an empty page, 150 MiB, a query 0.3 s, and {TIMES} times as fast as MLflow's page",
        over <= most_s
        and mib <= 150
        and found["query_s"] <= 0.3
        and all(one is None or one >= TIMES for one in (ratio, query_ratio)),
        over_empty_s=over,
        **found,
        **spent_s("list", visits),
        **({"times_mlflow": ratio, "times_mlflow_query": query_ratio} if ratio else {}),
        peak_mib=mib,
        restarted_s=warm_s,
        first_start_s=cold_s,
        first_start_cpu_s=cold_cpu_s,
        first_start_peak_mib=cold_mib,
        **load,
    )
