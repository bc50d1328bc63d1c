"""Runs for other trackers."""

from __future__ import annotations

import csv
import io
import math
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import UserError
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog
from paceline.trackers.board import FollowedRun
from paceline.trackers.event_file import EventFile, event_folders
from paceline.trackers.export import event_writer, to_csv, to_mlflow, to_parquet, to_tensorboard
from tests.helpers import make_job, make_run

MLFLOW = """
import sys
from paceline.runs.folder import RunFolder
from pathlib import Path
from paceline.trackers.export import to_mlflow
import mlflow
folder, uri = RunFolder(Path(sys.argv[1])), sys.argv[2]
made = to_mlflow(folder, uri, "copies", files=True)
client = mlflow.MlflowClient(uri)
run = client.get_run(made)
assert client.get_experiment(run.info.experiment_id).name == "copies"
assert run.data.params == {"lr": "0.1"}
assert run.data.tags["paceline.run_id"] == folder.run_id
assert [(one.step, one.value) for one in client.get_metric_history(made, "loss")] == [(0, 1.0), (0, 2.0), (1, 0.5)]
assert [one.path for one in client.list_artifacts(made, "outputs")] == ["outputs/model.txt"]
"""


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder, fd = make_run(tmp_path / "runs", job=make_job(arguments=("--lr", "0.1")))
    os.close(fd)
    log = MetricLog(folder.metric_log(0))
    for step, value in enumerate((1.0, 0.5)):
        log.scalar("loss", value, step, 12.5 + step)
    log.scalar("stage", "warm", None, 20.0)
    log.other("image", "picture", "images/a.png")
    MetricLog(folder.metric_log(1)).scalar("loss", 2.0, 0, 13.0)
    (folder.outputs / "model.txt").write_text("weights")
    return folder


@pytest.mark.promise("runs-go-out-csv-parquet")
def test_csv_export_has_a_row_for_each_value(folder: RunFolder, tmp_path: Path) -> None:
    out = io.StringIO()
    to_csv([folder], out)
    rows = list(csv.DictReader(io.StringIO(out.getvalue())))
    found = [(row["metric"], row["step"], row["value"], row["time"], row["rank"]) for row in rows]
    assert found == [
        ("loss", "0", "1.0", "12.5", "0"),
        ("loss", "0", "2.0", "13.0", "1"),
        ("loss", "1", "0.5", "13.5", "0"),
        ("stage", "", "warm", "20.0", "0"),
        ("picture", "", "images/a.png", rows[4]["time"], "0"),
    ]
    import pandas

    assert to_parquet([folder], tmp_path / "a.parquet") == 5
    frame = pandas.read_parquet(tmp_path / "a.parquet")
    assert list(frame["value"])[:3] == [1.0, 2.0, 0.5]
    assert (frame["text"][3], str(frame["time"][0])) == ("warm", "1970-01-01 00:00:12.500000+00:00")


@pytest.mark.promise("runs-go-out-csv-parquet")
def test_event_files_have_the_values_of_each_rank_with_step_and_time(folder: RunFolder, tmp_path: Path) -> None:
    first, second = to_tensorboard([folder], tmp_path / "tb")
    assert [place.relative_to(tmp_path / "tb" / folder.run_id).name for place in (first, second)] == [
        "rank_0",
        "rank_1",
    ]
    (file,) = first.iterdir()
    assert [tuple(one) for one in EventFile(file).new()] == [("loss", 0, 1.0, 12.5), ("loss", 1, 0.5, 13.5)]
    (file,) = second.iterdir()
    assert [tuple(one) for one in EventFile(file).new()] == [("loss", 0, 2.0, 13.0)]


ODD = """
import sys
from paceline.errors import UserError
from paceline.runs import tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog
from pathlib import Path
from paceline.trackers import export
import mlflow
folder, uri = RunFolder(Path(sys.argv[1])), sys.argv[2]
names = ["recall@5", "/loss", "a//b", "a/../b", "c/", "..", ".", "100%"]
log = MetricLog(folder.metric_log(0))
for name in names:
    log.scalar(name, 1.0, 0)
tags_and_properties.set_tags(folder.notes, {f"tag@{number}": "x" for number in range(150)})
made = export.to_mlflow(folder, uri, "copies")
client = mlflow.MlflowClient(uri)
run = client.get_run(made)
for name in ("recall_5", "_loss", "a_/b", "a_../b", "c_", "_.", "_", "100_"):
    assert run.data.metrics[name] == 1.0, run.data.metrics
assert len([name for name in run.data.tags if name.startswith("tag_")]) == 150
assert run.data.params == {"lr": "0.1"}
# A run that the server refuses ends as failed.
export.mlflow_name = lambda name: "a@b"
try:
    export.to_mlflow(folder, uri, "refused")
except UserError as error:
    assert "a@b" in str(error), error
else:
    raise AssertionError("no error")
(left,) = client.search_runs([client.get_experiment_by_name("refused").experiment_id])
assert left.info.status == "FAILED", left.info.status
"""


@pytest.mark.promise("runs-go-out-csv-parquet")
@pytest.mark.parametrize("program", ["MLFLOW", "ODD"], ids=["all values", "odd names and many tags"])
def test_mlflow_export_has_parameters_all_values_and_files(folder: RunFolder, tmp_path: Path, program: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", globals()[program], str(folder.path), (tmp_path / "mlruns").as_uri()],
        env={**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_unknown_mlflow_uri_is_named_in_the_error(folder: RunFolder) -> None:
    with pytest.raises(UserError, match="--to mlflow: nowhere://x refuses run"):
        to_mlflow(folder, "nowhere://x")


def test_unreachable_mlflow_server_is_reported_at_once(folder: RunFolder) -> None:
    with socket.socket() as nobody:
        # The port is bound, but no server listens on it.
        nobody.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        with pytest.raises(UserError, match=f"no server answers at {uri}: Connection refused. Start it"):
            to_mlflow(folder, uri)


@pytest.mark.promise("runs-go-out-csv-parquet")
def test_tensorboard_export_adds_metrics_missing_in_event_files(folder: RunFolder, tmp_path: Path) -> None:
    write = event_writer(folder.work / "runs" / "a")
    write("loss", 0, 1.0, 12.5)
    write(None, 0, 0.0, 0.0)
    below = event_writer(folder.work / "runs" / "a" / "b")
    below("deeper", 0, 1.0, 12.5)
    below(None, 0, 0.0, 0.0)
    assert event_folders(folder) == [folder.work / "runs" / "a", folder.work / "runs" / "a" / "b"]
    log = MetricLog(folder.metric_log(0))
    log.scalar("mine", 3.0, 1)
    log.scalar("huge", 10**400, 1)  # larger than any float
    feed = FollowedRun(folder, tmp_path / "top")
    feed.look()
    log.scalar("mine", 4.0, 2)
    feed.look()
    feed.look()
    assert (tmp_path / "top" / "work_runs_a").resolve() == folder.work / "runs" / "a"
    assert sorted(place.name for place in (tmp_path / "top").iterdir()) == ["metrics", "work_runs_a"]
    files = sorted((tmp_path / "top" / "metrics").iterdir())
    found = sorted((one.tag, one.step, one.value) for file in files for one in EventFile(file).new())
    assert found == [("huge", 1, math.inf), ("mine", 1, 3.0), ("mine", 2, 4.0)]
