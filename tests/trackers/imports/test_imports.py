"""Stores of other trackers come in as runs: whole, once, and without a change of the store."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli.export import import_runs as verb
from paceline.errors import UserError
from paceline.runs import artifacts, metrics, read, series, tags_and_properties, trash
from paceline.runs.folder import RunFolder
from paceline.trackers.imports import ImportReport, import_runs
from paceline.trackers.imports.adopt import Adopter
from paceline.trackers.imports.old_run import OldRun, Point
from tests.trackers.imports import stores
from tests.trackers.imports.stores import mlflow_lines, mlflow_run

HERE = Path(__file__).parent


@pytest.fixture
def ws(tmp_path: Path) -> Path:
    return tmp_path / "ws"


def only(report: ImportReport, ws: Path) -> RunFolder:
    (run,) = report.runs
    assert run["run_id"] is not None, run
    return RunFolder(ws / "runs" / run["run_id"])


def values(folder: RunFolder) -> dict[str, list[tuple[int | None, object]]]:
    return {name: list(zip(one.steps, one.values, strict=True)) for name, one in series.read(folder.metrics).items()}


def tree(top: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in sorted(top.rglob("*"))}


def test_mlflow_file_store_is_imported_completely(tmp_path: Path, ws: Path) -> None:
    old = tmp_path / "mlruns"
    lines = mlflow_lines(1.0, 0.5, float("nan"), float("inf"))
    tags = {"team": "vision", "mlflow.note.content": "A note."}
    files = {"model/weights.txt": "weights"}
    mlflow_run(
        old, "aa", metrics={"loss": lines, "val/acc": mlflow_lines(0.5)}, params={"lr": "0.1"}, tags=tags, files=files
    )
    mlflow_run(old, "bb", tags={"mlflow.parentRunId": "aa"}, status=4, run_name="child")
    mlflow_run(old, "cc", lifecycle_stage="deleted")
    before = tree(old)
    report = import_runs("mlflow", old, workspace=ws)
    assert report.counts == {"new": 2}
    assert tree(old) == before
    ids = {run["key"]: str(run["run_id"]) for run in report.runs}
    folder = RunFolder(ws / "runs" / ids["aa"])
    record = read.record(folder)
    assert (record.experiment, record.status, record.submitted_by) == ("digits-of-pi", "Completed", "ann")
    assert (record.started_utc, record.ended_utc) == ("2023-11-14T22:13:20.000Z", "2023-11-14T22:14:20.000Z")
    loss = values(folder)["loss"]
    assert loss[:2] == [(0, 1.0), (1, 0.5)]
    assert str(loss[2:]) == "[(2, nan), (3, inf)]"
    assert series.read(folder.metrics)["loss"].times[1] == 1_700_000_001.0
    notes = tags_and_properties.read(folder.notes)
    assert (notes.name, notes.description, notes.tags) == ("name of aa", "A note.", {"team": "vision"})
    assert notes.properties == {"imported_from": "mlflow:aa", "lr": "0.1"}
    assert artifacts.names(folder) == ["outputs/model/weights.txt"]
    child = read.record(RunFolder(ws / "runs" / ids["bb"]))
    assert (child.parent_run_id, child.status, child.exit_code) == (ids["aa"], "Failed", 1)


@pytest.mark.parametrize("error", [IndexError(), struct.error(), sqlite3.DatabaseError(), RecursionError(), EOFError()])
def test_run_that_can_not_be_read_is_reported_as_broken(ws: Path, error: Exception) -> None:
    def points() -> Iterator[Point]:
        raise error
        yield

    found = Adopter(ws / "runs", "mlflow", None, dry_run=True).add(OldRun(key="aa", experiment="digits", points=points))
    assert (found["outcome"], found["problems"]) == ("broken", [f"{type(error).__name__}: "])


def test_deleted_run_stays_in_the_trash_at_the_next_import(tmp_path: Path, ws: Path) -> None:
    mlflow_run(tmp_path / "mlruns", "aa", metrics={"loss": mlflow_lines(1.0)})
    folder = only(import_runs("mlflow", tmp_path / "mlruns", workspace=ws), ws)
    trash.delete(ws / "runs", [folder])
    (run,) = import_runs("mlflow", tmp_path / "mlruns", workspace=ws).runs
    assert (run["outcome"], folder.path.exists()) == ("unchanged", False)
    assert f"paceline restore {folder.run_id}" in run["problems"][0]
    trash.restore(ws, folder.run_id)
    assert only(import_runs("mlflow", tmp_path / "mlruns", workspace=ws), ws).path.is_dir()


def test_mlflow_database_is_imported(tmp_path: Path, ws: Path) -> None:
    stores.mlflow_database(tmp_path / "mlflow.db").close()
    before = tree(tmp_path)
    folder = only(import_runs("mlflow", tmp_path / "mlflow.db", workspace=ws), ws)
    assert {path: stamp for path, stamp in tree(tmp_path).items() if not path.startswith(str(ws))} == before
    assert str(values(folder)) == "{'loss': [(0, 0.5), (1, nan)], 'top': [(0, inf)]}"
    assert read.record(folder).status == "Canceled"
    assert artifacts.names(folder) == ["outputs/model.txt"]
    assert tags_and_properties.read(folder.notes).description == "A note."


def test_repeated_import_adds_only_new_runs_and_values(tmp_path: Path, ws: Path) -> None:
    old = tmp_path / "mlruns"
    mlflow_run(
        old,
        "aa",
        metrics={"loss": mlflow_lines(1.0)},
        tags={"team": "a"},
        files={"a.txt": "1"},
        status=1,
        end_time=None,
    )
    folder = only(import_runs("mlflow", old, workspace=ws), ws)
    assert read.record(folder).status == "Failed"
    assert "had no end in its mlflow store" in str(read.record(folder).failure)
    before = tree(ws)
    assert import_runs("mlflow", old, workspace=ws).counts == {"unchanged": 1}
    assert {name for name, stamp in tree(ws).items() if before.get(name) != stamp} == set()
    # A change that a user made here stays, unless the old store has changed the same value.
    tags_and_properties.set_tags(folder.notes, {"team": "mine"})
    tags_and_properties.set_name(folder.notes, "display_name", "my name")
    mlflow_run(
        old, "aa", metrics={"loss": mlflow_lines(1.0, 0.5)}, params={"lr": "1"}, files={"a.txt": "22", "b.txt": "3"}
    )
    mlflow_run(old, "bb")
    assert import_runs("mlflow", old, workspace=ws, dry_run=True).counts == {"grown": 1, "new": 1}
    assert import_runs("mlflow", old, workspace=ws).counts == {"grown": 1, "new": 1}
    assert import_runs("mlflow", old, workspace=ws).counts == {"unchanged": 2}
    assert values(folder) == {"loss": [(0, 1.0), (1, 0.5)]}
    notes = tags_and_properties.read(folder.notes)
    assert (notes.name, notes.tags, notes.properties["lr"]) == ("my name", {"team": "mine"}, "1")
    assert [path.read_text() for _, path in artifacts.files(folder)] == ["22", "3"]
    record = read.record(folder)
    assert (record.status, record.failure) == ("Completed", None)


def test_imported_values_stay_if_the_old_store_has_lost_them(tmp_path: Path, ws: Path) -> None:
    old = tmp_path / "mlruns"
    mlflow_run(old, "aa", metrics={"loss": mlflow_lines(1.0, 0.5)})
    folder = only(import_runs("mlflow", old, workspace=ws), ws)
    mlflow_run(old, "aa", metrics={"loss": mlflow_lines(1.0)})
    (run,) = import_runs("mlflow", old, workspace=ws).runs
    assert run["outcome"] == "unchanged"
    assert run["problems"] == ["its store has 1 values now, and had 2: the run keeps them all"]
    assert values(folder) == {"loss": [(0, 1.0), (1, 0.5)]}


KILLED = """
import os, sys
from paceline.trackers.imports import import_runs
import paceline.trackers.imports.adopt, paceline.trackers.imports.mlflow_store
left = int(sys.argv[3])
def hook(event, arguments):
    global left
    # Each change of the disk is one of these events.
    writes = event == "open" and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR)
    if writes or event in ("os.rename", "os.link", "os.remove", "os.mkdir"):
        left -= 1
        if left < 0:
            os.kill(os.getpid(), 9)
sys.addaudithook(hook)
import_runs("mlflow", sys.argv[1], workspace=sys.argv[2])
"""


@pytest.mark.parametrize("start", [0, 5, 11])
def test_killed_import_is_completed_by_the_next_one(tmp_path: Path, ws: Path, start: int) -> None:
    old = tmp_path / "mlruns"
    mlflow_run(old, "aa", metrics={"loss": mlflow_lines(1.0)}, params={"lr": "1"}, files={"a.txt": "1"})
    import_runs("mlflow", old, workspace=ws)
    mlflow_run(
        old, "aa", metrics={"loss": mlflow_lines(1.0, 0.5)}, params={"b": "2"}, tags={"t": "1"}, files={"a.txt": "22"}
    )
    mlflow_run(old, "bb", metrics={"loss": mlflow_lines(1.0, 0.5)}, params={"lr": "1"}, files={"a.txt": "1"})
    whole = tmp_path / "whole"
    shutil.copytree(ws, whole)
    import_runs("mlflow", old, workspace=whole)
    for place in range(start, 200, 16):
        killed = tmp_path / f"ws{place}"
        shutil.copytree(ws, killed)
        command = [sys.executable, "-c", KILLED, str(old), str(killed), str(place)]
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
        if ended.returncode != -signal.SIGKILL:
            assert ended.returncode == 0, ended.stderr
            assert place > 20
            break
        # No reader sees a run that is imported by half.
        for path in (killed / "runs").glob("[!.]*"):
            assert read.record(RunFolder(path)).is_terminal
            assert len(values(RunFolder(path))["loss"]) in ((1, 2) if path.name.endswith(aa_digest(ws)) else (2,))
        import_runs("mlflow", old, workspace=killed)
        assert content(killed) == content(whole)
        assert import_runs("mlflow", old, workspace=killed).counts == {"unchanged": 2}
    else:
        raise AssertionError("no import came to its end")


def aa_digest(ws: Path) -> str:
    (path,) = (ws / "runs").glob("[!.]*")
    return path.name.rpartition("_")[2]


def content(ws: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in (ws / "runs").iterdir():
        folder = RunFolder(path)
        notes = tags_and_properties.read(folder.notes)
        files = {name: place.read_text() for name, place in artifacts.files(folder)}
        found[path.name] = (
            values(folder),
            notes.properties,
            notes.tags,
            notes.display_name,
            files,
            read.record(folder).status,
        )
    return found


def test_damaged_runs_and_symlinks_in_an_mlflow_store_are_reported_and_other_runs_are_imported(
    tmp_path: Path, ws: Path
) -> None:
    old = tmp_path / "mlruns"
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("secret")
    mlflow_run(old, "aa", metrics={"loss": "x y z\n" + mlflow_lines(1.0) + f"5 0.5 {1 << 80}\n"}, files={"ok.txt": "1"})
    os.symlink(tmp_path / "secret" / "key", old / "1" / "aa" / "artifacts" / "link.txt")
    os.symlink(tmp_path / "secret", old / "1" / "aa" / "artifacts" / "folder")
    os.mkfifo(old / "1" / "aa" / "artifacts" / "pipe")
    place = mlflow_run(
        old, "bb", params={"huge": "x" * 200_000}, artifact_uri=(tmp_path / "secret").as_uri(), start_time=1 << 90
    )
    shutil.rmtree(place / "artifacts")
    (mlflow_run(old, "cc") / "meta.yaml").write_text("[not a mapping")
    (mlflow_run(old, "ee") / "meta.yaml").write_text("[" * 100_000)  # nested more deeply than Python can recurse
    mlflow_run(old, "dd", artifact_uri="s3://bucket/x", run_name="<script>alert(1)</script>")
    shutil.rmtree(old / "1" / "dd" / "artifacts")
    report = import_runs("mlflow", old, workspace=ws)
    found = {run["key"]: run for run in report.runs}
    assert report.counts == {"broken": 2, "new": 3}
    assert found["ee"]["outcome"] == "broken"
    assert found["cc"]["problems"][0].startswith("it can't be read: ")
    assert found["aa"]["problems"] == [
        "left out a line of a metric that can't be read: 'loss'",
        f"left out a step that is not a 64-bit number: '{1 << 80}'",
        "left out a link or special file: 'folder' and 2 more",
    ]
    folder = RunFolder(ws / "runs" / str(found["aa"]["run_id"]))
    assert values(folder) == {"loss": [(None, 0.5), (0, 1.0)]}
    assert artifacts.names(folder) == ["outputs/ok.txt"]
    assert found["bb"]["problems"] == [
        f"left out its files, which are not below the store: '{(tmp_path / 'secret').as_uri()}'",
        f"cut a text after 100,000 characters: '{'x' * 200}'",
    ]
    assert "s3://bucket/x" in found["dd"]["problems"][0]
    assert [path.name for path in (ws / "runs").iterdir() if path.name.startswith(".")] == []


def test_wandb_folder_becomes_a_run(tmp_path: Path, ws: Path) -> None:
    history = [stores.wandb_values(step, loss=str(1 / (1 + step)), val__acc="NaN", text='"warm"') for step in range(3)]
    picture = {"_type": "image-file", "path": "media/images/a.png"}
    history.append(stores.wandb_values(7, pic=json.dumps(picture), n="5", table='{"_type": "table-file"}'))
    place = stores.wandb_run(
        tmp_path / "wandb" / "offline-run-20231114_221320-abc",
        [stores.wandb_start(lr="0.1", model='{"depth": 3}'), *history],
    )
    (place / "files" / "media" / "images").mkdir(parents=True)
    (place / "files" / "media" / "images" / "a.png").write_text("png")
    (place / "files" / "output.log").write_text("hello\n")
    report = import_runs("wandb", tmp_path, workspace=ws)
    folder = only(report, ws)
    found = values(folder)
    assert found["loss"] == [(0, 1.0), (1, 0.5), (2, 1 / 3)]
    assert str(found["val.acc"]) == "[(0, nan), (1, nan), (2, nan)]"
    assert (found["text"][0], found["pic"], found["n"]) == ((0, "warm"), [(7, "outputs/media/images/a.png")], [(7, 5)])
    assert artifacts.names(folder) == ["logs/output.log", "outputs/media/images/a.png"]
    assert report.runs[0]["problems"] == ["kept only the file of a table-file: 'table'"]
    notes = tags_and_properties.read(folder.notes)
    assert (notes.name, notes.description, notes.tags) == ("calm-sea-1", "A note.", {"good": ""})
    assert notes.properties == {"imported_from": "wandb:digits/abc", "lr": "0.1", "model.depth": "3"}
    assert read.record(folder).status == "Failed"
    # The run is resumed, and ends.
    more = [stores.wandb_start(), stores.wandb_values(9, loss="0.1"), (stores.wandb_log.EXIT, b"")]
    stores.wandb_run(tmp_path / "wandb" / "offline-run-20231114_231320-abc", more)
    assert import_runs("wandb", tmp_path, workspace=ws).counts == {"grown": 1}
    assert values(folder)["loss"][-1] == (9, 0.1)
    assert read.record(folder).status == "Completed"


def test_log_written_by_the_wandb_package_is_imported(tmp_path: Path, ws: Path) -> None:
    place = tmp_path / "wandb" / "offline-run-20261128_220052-img1"
    place.mkdir(parents=True)
    shutil.copy(HERE / "run-img1.wandb", place)
    folder = only(import_runs("wandb", tmp_path / "wandb", workspace=ws), ws)
    assert {name: found for name, found in values(folder).items() if name != "pic"} == {
        "n": [(9, 1_000_000)],
        "inf": [(9, float("inf"))],
        "best": [(None, 0.5)],
    }
    assert read.record(folder).status == "Failed"


@pytest.mark.parametrize("size", [32_700, 32_761, 32_768, 100_000])
def test_wandb_records_that_span_several_log_blocks_are_read(tmp_path: Path, size: int) -> None:
    data = [(stores.wandb_log.HISTORY, bytes([number]) * length) for number, length in enumerate((3, size, 5, size))]
    log = stores.wandb_run(tmp_path / "run-1-abc", data) / "run-abc.wandb"
    assert list(stores.wandb_log.records(log)) == data
    log.write_bytes(log.read_bytes()[:-1])
    said: list[str] = []
    assert list(stores.wandb_log.records(log, said.append)) == data[:-1]
    assert said == ["left out the rest of its log after a torn or damaged record"]


def test_each_event_folder_of_tensorboard_becomes_a_run(tmp_path: Path, ws: Path) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from paceline.trackers.export import event_writer

    for name in ("a", "b/c"):
        write = event_writer(tmp_path / "logs" / name)
        for step in range(2):
            write("loss", step, 1 / (1 + step), 1_700_000_000.0 + step)
        write(None, 0, 0.0, 0.0)
    report = import_runs("tensorboard", tmp_path / "logs", workspace=ws)
    assert [run["key"] for run in report.runs] == ["logs/a", "logs/b/c"]
    for run in report.runs:
        assert values(RunFolder(ws / "runs" / str(run["run_id"]))) == {"loss": [(0, 1.0), (1, 0.5)]}
    record = read.record(RunFolder(ws / "runs" / str(report.runs[1]["run_id"])))
    assert (record.experiment, record.ended_utc) == ("logs", "2023-11-14T22:13:21.000Z")


def test_neptune_export_becomes_a_run(tmp_path: Path, ws: Path) -> None:
    pytest.importorskip("pyarrow", reason="the extra tabular is not installed")
    stores.neptune_export(tmp_path / "export", stores.neptune_rows())
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "export" / "files" / "lab_digits").mkdir(parents=True)
    (tmp_path / "export" / "files" / "lab_digits" / "model.txt").write_text("weights")
    report = import_runs("neptune", tmp_path / "export", workspace=ws, experiment="moved")
    folder = only(report, ws)
    assert values(folder) == {"metrics/loss": [(0, 1.0), (1, 0.5)]}
    notes = tags_and_properties.read(folder.notes)
    assert (notes.name, notes.tags, notes.properties["params/lr"]) == ("first", {"good": ""}, "0.1")
    assert artifacts.names(folder) == ["outputs/model/model.txt"]
    assert report.runs[0]["problems"] == ["left out a file whose path leaves the export: '../../secret.txt'"]
    assert (read.record(folder).experiment, read.record(folder).status) == ("moved", "Failed")
    # A run that was moved to another experiment is not imported a second time.
    assert import_runs("neptune", tmp_path / "export" / "data", workspace=ws).counts == {"unchanged": 1}


def test_aim_repository_becomes_runs_and_is_not_changed(tmp_path: Path, ws: Path) -> None:
    aim = pytest.importorskip("aim", reason="aim is not installed")
    old = tmp_path / "old"
    old.mkdir()
    quiet = {"log_system_params": False, "capture_terminal_logs": False, "system_tracking_interval": None}
    run = aim.Run(repo=aim.Repo.from_path(str(old), init=True), experiment="digits", **quiet)
    run["lr"] = 0.1
    run.add_tag("good")
    run.track(0.5, name="loss", step=3, context={"subset": "val"})
    run.close()
    before = tree(old)
    folder = only(import_runs("aim", old, workspace=ws), ws)
    assert tree(old) == before
    assert values(folder) == {"loss subset=val": [(3, 0.5)]}
    notes = tags_and_properties.read(folder.notes)
    assert (notes.properties["lr"], notes.tags) == ("0.1", {"good": ""})
    assert import_runs("aim", old, workspace=ws).counts == {"unchanged": 1}


def test_import_from_aim_without_its_package_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aim", None)
    (tmp_path / ".aim").mkdir()
    with pytest.raises(UserError, match=r"need aim, on Python 3\.12 or older: pip install aim"):
        import_runs("aim", tmp_path, workspace=tmp_path / "ws")


def test_dry_run_of_an_import_counts_new_runs_and_writes_nothing(tmp_path: Path, ws: Path) -> None:
    mlflow_run(tmp_path / "mlruns", "aa")
    assert import_runs("mlflow", tmp_path / "mlruns", workspace=ws, dry_run=True).counts == {"new": 1}
    assert not ws.exists()


@pytest.mark.parametrize(
    ("tracker", "path", "message"),
    [
        (
            "mlfow",
            ".",
            "tracker 'mlfow': choose one of mlflow, wandb, tensorboard, neptune, aim. Did you mean 'mlflow'?",
        ),
        ("mlflow", "nowhere", "there is no '{top}/nowhere'. Give the path of the mlflow store."),
        (
            "mlflow",
            ".",
            "'{top}' is no MLflow store: it has neither experiments nor mlflow.db. Name mlruns or the database.",
        ),
        (
            "mlflow",
            "text",
            "'{top}/text' is no database of MLflow: file is not a database. Name mlruns or the database.",
        ),
        ("wandb", ".", "'{top}' is no W&B folder: it has no run-*/run-*.wandb. Name the folder `wandb`."),
        ("aim", ".", "'{top}' has no folder .aim. Name the folder in which you called `aim init`."),
        ("tensorboard", ".", "'{top}' has no event files (*tfevents*). Name TensorBoard's --logdir."),
    ],
)
def test_import_from_a_path_without_a_store_is_refused(tmp_path: Path, tracker: str, path: str, message: str) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "text").write_text("no database " * 100)
    with pytest.raises(UserError) as caught:
        import_runs(tracker, tmp_path / "old" / path, workspace=tmp_path / "ws")
    assert str(caught.value) == message.format(top=tmp_path / "old")


def test_import_command_prints_runs_and_problems(
    tmp_path: Path, ws: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PACELINE_WORKSPACE", str(ws))
    mlflow_run(tmp_path / "mlruns", "aa", metrics={"loss": "\x1b[31m\n"})
    (mlflow_run(tmp_path / "mlruns", "bb") / "meta.yaml").write_text("1")
    assert verb(tracker="mlflow", path=tmp_path / "mlruns", experiment="old", dry_run=False, as_json=False) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("new       old_1700000000_")
    assert lines[1] == "          left out a line of a metric that can't be read: 'loss'"
    assert lines[-1] == "Imported from mlflow: 1 new, 1 broken."
    assert metrics.read(next((ws / "runs").iterdir()) / "metrics") == {}
