"""Fingerprints of the content of files, not of their times."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.data.datasets.content import content_fingerprint, with_content
from paceline.data.datasets.dataset import Dataset
from paceline.data.stores.datastore import Datastore
from paceline.data.transfer.listing import list_files
from paceline.errors import TransferError
from paceline.job.data_reference import Source
from tests.helpers import write_tree

FILES = {"a.txt": "alpha", "deep/b.txt": "beta", "deep/c d/ü.txt": ""}


@pytest.fixture
def workspace(tmp_path: Path) -> SimpleNamespace:
    return SimpleNamespace(path=tmp_path / "ws")


def of_folder(folder: Path, workspace: SimpleNamespace) -> str:
    return content_fingerprint(with_content(list_files([Source(path=str(folder))], workspace.path), workspace.path))


def test_copied_folder_has_the_same_content_fingerprint_as_the_original(tmp_path, workspace):
    write_tree(tmp_path / "one", FILES)
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    assert of_folder(tmp_path / "one", workspace) == of_folder(tmp_path / "other", workspace)


def test_fingerprint_ignores_file_times_and_equal_rewritten_files(tmp_path, workspace):
    write_tree(tmp_path / "one", FILES)
    before = of_folder(tmp_path / "one", workspace)
    os.utime(tmp_path / "one/a.txt", (1, 1))
    (tmp_path / "one/deep/b.txt").unlink()
    (tmp_path / "one/deep/b.txt").write_text("beta")
    assert of_folder(tmp_path / "one", workspace) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda top: (top / "a.txt").write_text("alphA"),
        lambda top: (top / "a.txt").rename(top / "b.txt"),
        lambda top: (top / "new.txt").write_text(""),
        lambda top: (top / "deep/b.txt").unlink(),
    ],
)
def test_each_change_of_names_or_content_changes_the_fingerprint(tmp_path, workspace, change):
    write_tree(tmp_path / "one", FILES)
    before = of_folder(tmp_path / "one", workspace)
    change(tmp_path / "one")
    assert of_folder(tmp_path / "one", workspace) != before


def test_unmodified_file_is_not_read_again_for_its_fingerprint(tmp_path, workspace, monkeypatch):
    write_tree(tmp_path / "one", {"a.txt": "alpha"})
    os.utime(tmp_path / "one/a.txt", (10**9, 10**9))
    before = of_folder(tmp_path / "one", workspace)
    monkeypatch.setattr("paceline.data.datasets.content.hashlib.sha256", lambda *_: pytest.fail("read again"))
    infos = list_files([Source(path=str(tmp_path / "one"))], workspace.path)
    (found,) = with_content(infos, workspace.path)
    monkeypatch.undo()
    assert content_fingerprint([found]) == before


def test_content_change_is_detected_even_if_the_modification_time_is_restored(tmp_path, workspace):
    write_tree(tmp_path / "one", {"a.txt": "alpha"})
    times = os.stat(tmp_path / "one/a.txt")
    before = of_folder(tmp_path / "one", workspace)
    (tmp_path / "one/a.txt").write_text("omega")
    os.utime(tmp_path / "one/a.txt", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert of_folder(tmp_path / "one", workspace) != before


def test_hashes_are_recomputed_if_their_database_is_damaged(tmp_path, workspace):
    write_tree(tmp_path / "one", FILES)
    before = of_folder(tmp_path / "one", workspace)
    database = Path(os.environ["PACELINE_DATA_CACHE"]) / "digests.sqlite"
    database.write_bytes(b"no database")
    assert of_folder(tmp_path / "one", workspace) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_dataset_file_is_named_in_the_error(tmp_path, workspace):
    write_tree(tmp_path / "one", FILES)
    (tmp_path / "one/a.txt").chmod(0)
    with pytest.raises(TransferError, match=r"a\.txt"):
        of_folder(tmp_path / "one", workspace)


def test_fingerprint_of_a_selection_covers_only_its_files(tmp_path, workspace):
    write_tree(tmp_path / "store", {f"x/{n}.txt": str(n) for n in range(5)})
    store = Datastore.register(workspace, "lab", tmp_path / "store")
    dataset = Dataset.File.from_files((store, "x")).skip(1).take(3).register(workspace, "some")
    reference = dataset.as_named_input("some").as_download()
    infos = list_files(reference.sources, workspace.path)
    assert content_fingerprint(with_content(infos, workspace.path)) == dataset.fingerprint


def test_uploading_the_same_files_again_makes_no_new_version(tmp_path, workspace):
    write_tree(tmp_path / "data", FILES)
    store = Datastore.register(workspace, "lab", tmp_path / "store")
    versions = []
    for _ in range(2):
        store.upload(tmp_path / "data", "x", overwrite=True)
        dataset = Dataset.File.from_files((store, "x")).register(workspace, "x")
        assert dataset.check()
        versions.append(dataset.version)
    assert versions == [1, 1]
