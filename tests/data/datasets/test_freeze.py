"""Frozen versions: their content stays, although the files change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from paceline.data import Dataset, Datastore
from paceline.data.datasets import freeze as freezing
from paceline.data.datasets import registered
from paceline.errors import DataError, TransferError
from paceline.job.data_reference import DataReference
from tests.cli.conftest import Cli, cli
from tests.data.conftest import OBJECT_STORES, OTHER_STORES, s3_store, server_of
from tests.helpers import write_tree

__all__ = ["cli"]

FILES = {"a.csv": "x\n1\n", "deep/b.csv": "x\n2\n", "deep/same.csv": "x\n1\n"}


@pytest.fixture
def source(tmp_path):
    return write_tree(tmp_path / "source", FILES)


@pytest.fixture
def digits(workspace, source):
    return Dataset.File.from_files(str(source)).register(workspace, "digits")


@pytest.fixture(params=["local", "s3", *OTHER_STORES, "sftp"])
def lab(request, workspace, tmp_path):
    if request.param in OBJECT_STORES:
        server = server_of(request)
        server.bucket(request.getfixturevalue("bucket"))
        return s3_store(workspace, server.url, f"{request.getfixturevalue('bucket')}/team")
    if request.param == "sftp":
        sshd = request.getfixturevalue("sshd")
        return Datastore.register(workspace, "lab", sshd.url(tmp_path / "far"), options=sshd.options())
    return Datastore.register(workspace, "lab", tmp_path / "near")


def content(dataset, folder):
    dataset.download(folder)
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.promise("frozen-dataset-keeps-content")
def test_frozen_version_keeps_its_content_when_its_files_change_or_vanish(workspace, source, digits, lab, tmp_path):
    frozen = digits.freeze("lab")
    assert (frozen.version, frozen.is_frozen) == (1, True)
    (source / "a.csv").write_text("x\n9\n")
    (source / "new.csv").write_text("x\n7\n")
    found = Dataset.get_by_name(workspace, "digits")
    assert content(found, tmp_path / "one") == FILES
    assert found.to_path() == ["/a.csv", "/deep/b.csv", "/deep/same.csv"]
    assert found.check()
    assert found.as_mount().frozen
    assert DataReference.from_json(found.as_mount().to_json()) == found.as_mount()
    shutil.rmtree(source)
    assert content(found, tmp_path / "two") == FILES
    assert found.freeze().sources == found.freeze("lab").sources == found.sources
    for elsewhere in ("lab:other", "default", "nostore"):
        with pytest.raises(DataError, match=f"digits:1 is frozen in .* already, and '{elsewhere}' is another place"):
            found.freeze(elsewhere)


def test_equal_files_of_two_frozen_versions_are_stored_once(workspace, source, digits):
    digits.freeze()
    (source / "a.csv").write_text("x\n9\n")
    second = Dataset.File.from_files(str(source)).register(workspace, "digits", create_new_version=True).freeze()
    kept = workspace.path / "data" / "frozen"
    assert len(list((kept / ".contents").iterdir())) == 3
    files = [path for path in kept.rglob("*.csv") if path.is_file()]
    assert len(files) == 6
    assert {path.stat().st_ino for path in files} == {path.stat().st_ino for path in (kept / ".contents").iterdir()}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o444}
    assert second.check()


def test_frozen_single_file_is_mounted_as_a_file(workspace, source, take):
    one = Dataset.File.from_files(str(source / "a.csv")).register(workspace, "one").freeze()
    (source / "a.csv").write_text("changed")
    fetched = take(one.as_mount())
    assert fetched.path.read_text() == "x\n1\n"


def test_frozen_table_has_the_rows_of_its_registered_version(workspace, tmp_path):
    write_tree(tmp_path, {f"t/{number}.csv": f"x\n{number}\n{number * 10}\n" for number in range(5)})
    table = Dataset.Tabular.from_delimited_files(str(tmp_path / "t/*.csv"), include_path=True).take(4)
    before = table.register(workspace, "t").to_pandas_dataframe()
    frozen = Dataset.get_by_name(workspace, "t").freeze()
    shutil.rmtree(tmp_path / "t")
    assert frozen.to_pandas_dataframe()["x"].tolist() == before["x"].tolist() == [0, 0, 1, 10]
    assert frozen.skip(2).to_pandas_dataframe()["x"].tolist() == [1, 10]


def test_freeze_raises_data_error_if_files_have_changed_since_the_registration(workspace, source, digits):
    (source / "a.csv").write_text("x\n9\n")
    with pytest.raises(DataError, match=r"no longer has the content that was registered: 1 changed .*a\.csv"):
        digits.freeze()
    assert not Dataset.get_by_name(workspace, "digits").is_frozen


def test_file_that_changes_while_it_is_frozen_raises_an_error(workspace, source, digits, monkeypatch):
    real = freezing._hashes

    def hashes(paths):
        found = real(paths)
        (source / "a.csv").write_text("x\n9\n")
        return found

    monkeypatch.setattr(freezing, "_hashes", hashes)
    with pytest.raises(DataError, match=r"'a.csv' changed while it was stored"):
        digits.freeze()
    monkeypatch.undo()
    (source / "a.csv").write_text("x\n1\n")
    assert content(digits.freeze(), workspace.path / "copy") == FILES, "a wrong content is not used again"


@pytest.mark.promise("frozen-dataset-keeps-content")
def test_damaged_frozen_file_is_named_in_the_error(workspace, digits, tmp_path):
    frozen = digits.freeze(str(tmp_path / "near"))
    (tree,) = [path for path in (tmp_path / "near").iterdir() if path.name != ".contents"]
    damaged = tree / "deep/b.csv"
    damaged.chmod(0o644)
    damaged.write_text("x\n8\n")
    (tree / "deep/extra.csv").write_text("")
    found = frozen.check()
    assert (found.changed, found.added, found.removed) == (("deep/b.csv",), ("deep/extra.csv",), ())
    with pytest.raises(DataError, match="have changed: register a new version"):
        frozen.freeze()


def test_interrupted_freeze_is_completed_by_the_next_one(workspace, digits, lab, monkeypatch):
    real = registered.keep_frozen
    monkeypatch.setattr(registered, "keep_frozen", lambda *_: (_ for _ in ()).throw(TransferError("killed")))
    with pytest.raises(TransferError):
        digits.freeze("lab")
    assert not Dataset.get_by_name(workspace, "digits").is_frozen
    monkeypatch.setattr(registered, "keep_frozen", real)
    monkeypatch.setattr(freezing, "put_files", lambda store, path, files: pytest.fail("stored again") if files else 0)
    assert digits.freeze("lab").check()


def test_freeze_uses_the_files_that_a_concurrent_freeze_of_the_same_dataset_stored_first(digits, tmp_path, monkeypatch):
    real = os.rename

    def second(source, target):
        if os.path.isdir(source):
            shutil.copytree(source, target)  # simulates that another process has stored this folder first
        real(source, target)

    monkeypatch.setattr(os, "rename", second)
    frozen = digits.freeze(str(tmp_path / "near"))
    monkeypatch.undo()
    assert content(frozen, tmp_path / "copy") == FILES
    assert sorted(path.name.startswith(".new") for path in (tmp_path / "near").iterdir()) == [False, False]


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("a b", "is not a place"),
        ("nowhere", "there is no datastore 'nowhere'"),
        ("https://h/x", "nothing can be stored"),
    ],
)
def test_freeze_refuses_an_invalid_unknown_or_read_only_destination(digits, where, why):
    with pytest.raises(DataError, match=why):
        digits.freeze(where)


def test_dataset_with_equal_file_names_cannot_be_frozen(workspace, tmp_path):
    write_tree(tmp_path, {"p/x.csv": "1", "q/x.csv": "2"})
    twice = Dataset.File.from_files([str(tmp_path / "p/x.csv"), str(tmp_path / "q/x.csv")]).register(workspace, "twice")
    with pytest.raises(DataError, match="another order or equal names"):
        twice.freeze()


@pytest.mark.promise("frozen-dataset-keeps-content")
def test_a_run_reads_the_frozen_files_and_refuses_changed_ones(cli: Cli) -> None:
    write_tree(cli.folder / "table", {"a.csv": "frozen"})
    cli.script(
        """
        import sys
        import paceline as pl
        workspace = pl.Workspace.from_config()
        if "register" in sys.argv:
            pl.Dataset.File.from_files("table").register(workspace, "table")
        data = pl.Dataset.get_by_name(workspace, "table").as_named_input("data").as_mount()
        estimator = pl.Estimator(source_directory="job", entry_script="read.py", script_params={"--data": data})
        run = pl.Experiment(workspace, "read").submit(estimator)
        print(run.wait_for_completion(raise_on_error=False).status)
        """,
        "driver.py",
    )
    cli.script(
        "import pathlib, sys\nprint(*(path.read_text() for path in pathlib.Path(sys.argv[2]).iterdir()))\n",
        "job/read.py",
    )

    def drive(*words: str) -> str:
        words = (sys.executable, "driver.py", *words)
        environment = {**cli.environment, "PACELINE_DATA_CACHE": str(cli.folder / "cache")}
        done = subprocess.run(words, cwd=cli.folder, env=environment, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "Completed" in drive("register")
    row = cli.json("data", "freeze", "table")
    assert (row["name"], row["version"]) == ("table", 1)
    (cli.folder / "table/a.csv").write_text("changed")
    assert "Completed" in drive()
    assert "frozen" in cli("logs").stdout
    assert cli.json("data", "check", "table:1")["changed"] == []
    place = cli.folder / ".paceline/data" / row["place"].partition(":")[2]
    (kept,) = place.iterdir()
    kept.chmod(0o644)
    kept.write_text("damage")
    assert "Failed" in drive()
    assert "the frozen files of table:1 have changed" in cli("show").stdout
    assert cli("data", "check", "table", code=1).stdout
    assert json.loads((cli.folder / ".paceline/datasets/table/1.json").read_text())["frozen"]
    os.unlink(kept)
