"""metrics: last, least and greatest values, series, runs side by side; as a table, as CSV, as JSON."""

from __future__ import annotations

import csv
import io
import json
import os

import pytest

from paceline.runs.metrics import MetricLog
from tests.cli.conftest import Cli, Gallery
from tests.helpers import make_run


def test_metrics_command_prints_a_table(gallery: Gallery) -> None:
    lines = [line.split() for line in gallery("metrics", gallery.good).stdout.splitlines()]
    assert lines == [
        ["METRIC", "LAST", "MIN", "MAX", "STEP", "VALUES"],
        ["loss", "0.125", "0.125", "1", "-", "8"],
        ["accuracy", "0.5", "0.5", "0.5", "-", "1"],
        ["nan", "nan", "-", "-", "-", "1"],
    ]
    assert gallery.json("metrics", gallery.good) == [
        {
            "run_id": gallery.good,
            "display_name": gallery.json("status", gallery.good)["display_name"],
            "metrics": {
                "loss": {"last": 0.125, "min": 0.125, "max": 1.0, "last_step": None, "count": 8},
                "accuracy": {"last": 0.5, "min": 0.5, "max": 0.5, "last_step": None, "count": 1},
                "nan": {"last": "NaN", "min": None, "max": None, "last_step": None, "count": 1},
            },
        }
    ]


def test_metrics_of_a_run_without_metrics_prints_a_note(gallery: Gallery) -> None:
    assert gallery("metrics", gallery.bad).stdout == f"No metrics were logged in {gallery.bad}.\n"
    assert (
        gallery("metrics", gallery.bad, "--rank", "1").stdout == f"No metrics were logged by rank 1 in {gallery.bad}.\n"
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Gallery:
    """`good` and `bad`: two runs that log the same metrics with steps; `good` logs one more."""
    cli = Gallery(tmp_path_factory.mktemp("two"))
    script = """
        import os, paceline
        run, rate = paceline.Run.get_context(), float(os.environ["RATE"])
        for step in range(0, 30, 10):
            run.log("loss", rate / (1 + step), step=step)
        run.log("evil", "a\\x1b[2Jb")
        if rate > 1:
            run.log("only", 3)
    """
    cli.good = cli.submit(script, "--env", "RATE=2.0")
    cli.bad = cli.submit(script, "--env", "RATE=1.0")
    assert (cli.wait(cli.good), cli.wait(cli.bad)) == ("Completed", "Completed")
    return cli


def test_metrics_of_two_runs_are_columns_of_one_table(two: Gallery) -> None:
    lines = [line.split() for line in two("metrics", two.good, two.bad).stdout.splitlines()]
    names = [two.json("status", run_id)["display_name"] for run_id in (two.good, two.bad)]
    assert lines == [
        ["METRIC", *names],
        ["loss", "last", "0.0952381", "0.047619"],
        ["min", "0.0952381", "0.047619"],
        ["max", "2", "1"],
        ["evil", "last", "a\\x1b[2Jb", "a\\x1b[2Jb"],
        ["only", "last", "3", "-"],
    ]
    series = two("metrics", two.good, two.bad, "--name", "loss").stdout.splitlines()
    assert [line.split() for line in series[1:]] == [
        ["0", "2", "1"],
        ["10", "0.181818", "0.0909091"],
        ["20", "0.0952381", "0.047619"],
    ]
    assert series[0].split() == ["STEP", *names]


def test_metrics_with_name_lists_steps_times_and_values(two: Gallery) -> None:
    rows = list(csv.DictReader(io.StringIO(two("metrics", two.good, two.bad, "--name", "loss", "--csv").stdout)))
    assert [(row["run_id"], row["metric"], row["step"], row["value"]) for row in rows] == [
        (run_id, "loss", str(step), str(rate / (1 + step)))
        for run_id, rate in ((two.good, 2.0), (two.bad, 1.0))
        for step in (0, 10, 20)
    ]
    (found,) = json.loads(two("metrics", two.bad, "--name", "loss", "--json").stdout)
    assert found["series"]["loss"]["steps"] == [0, 10, 20]
    assert found["series"]["loss"]["times_utc"] == [row["time_utc"] for row in rows[3:]]
    both = two("metrics", two.good, "--name", "only", "--name", "loss").stdout.splitlines()
    assert [both[0], both[4]] == ["only:", "loss:"]


def test_impossible_time_of_a_value_is_empty_in_csv_and_null_in_json(cli: Cli) -> None:
    folder, fd = make_run(cli.folder / ".paceline" / "runs")
    os.close(fd)
    log = MetricLog(folder.metric_log(0))
    for time_s in (1.7e12, -1e300, 0.0):  # 1.7e12 is a time in milliseconds
        log.scalar("loss", 1.0, None, time_s)
    rows = list(csv.DictReader(io.StringIO(cli("metrics", folder.run_id, "--name", "loss", "--csv").stdout)))
    assert sorted(row["time_utc"] for row in rows) == ["", "", "1970-01-01T00:00:00.000Z"]
    (found,) = json.loads(cli("metrics", folder.run_id, "--name", "loss", "--json").stdout)
    assert found["series"]["loss"]["times_utc"].count(None) == 2


def test_metrics_as_csv_have_a_row_for_each_metric(two: Gallery) -> None:
    rows = list(csv.reader(io.StringIO(two("metrics", two.good, "--csv").stdout)))
    assert rows[:2] == [
        ["run_id", "metric", "last", "min", "max", "last_step", "count"],
        [two.good, "loss", str(2 / 21), str(2 / 21), "2.0", "20", "3"],
    ]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--name", "nope"], "--name 'nope': no such metric in {run}. There are loss, evil, only."),
        (["--csv", "--json"], "choose one"),
        (["--rank", "1"], "has rank 0 alone"),
        (["none_such"], "no run 'none_such'"),
    ],
)
def test_invalid_metrics_call_is_refused(two: Gallery, words: list[str], complaint: str) -> None:
    assert complaint.format(run=two.good) in two("metrics", two.good, *words, code=2).stderr


def test_metrics_command_fails_if_the_workspace_has_no_run(cli: Cli) -> None:
    assert "there is no run in" in cli("metrics", code=2).stderr
