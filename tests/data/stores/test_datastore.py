"""Datastores by name: registration, refusals, and files copied in and out by hand."""

from __future__ import annotations

import json
import pickle
import re

import pytest

from paceline.data.stores.datastore import Datastore
from paceline.errors import DataError, TransferError
from paceline.job.data_reference import Source
from tests.data.conftest import s3_store
from tests.helpers import fill_disk, write_tree

FILES = {"a.txt": b"1", "sub dir/ü.txt": b"22", "empty": b""}


def test_default_store_exists_without_registration(workspace):
    store = Datastore.get_default(workspace)
    assert (store.name, store.kind, store.url) == ("default", "local", str(workspace.path / "data"))
    assert store == Datastore(workspace, "default") == Datastore.get(workspace, "default")
    assert list(Datastore.list(workspace)) == ["default"]
    assert store.files() == []


def test_registered_store_is_found_until_unregistered(workspace, tmp_path):
    store = Datastore.register(workspace, "lab", tmp_path / "files", default=True)
    assert Datastore.get_default(workspace) == store
    assert list(Datastore.list(workspace)) == ["default", "lab"]
    Datastore.get(workspace, "default").set_as_default()
    assert not store.is_default
    store.set_as_default()
    store.unregister()
    assert Datastore.get_default(workspace).name == "default"
    with pytest.raises(DataError, match=r"there is no datastore 'lab' in .* There are: default"):
        Datastore.get(workspace, "lab")


def test_registered_name_is_replaced_only_with_overwrite(workspace, tmp_path):
    Datastore.register(workspace, "lab", tmp_path / "a")
    with pytest.raises(DataError, match="overwrite=True"):
        Datastore.register(workspace, "lab", tmp_path / "b")
    assert Datastore.register(workspace, "lab", tmp_path / "b", overwrite=True).url == str(tmp_path / "b")


@pytest.mark.parametrize("name", ["", "a b", "../x", "a/b", ".default", "-x", "ü", "a\n", 7])
def test_invalid_datastore_name_is_refused(workspace, tmp_path, name):
    with pytest.raises(DataError, match="letters, digits"):
        Datastore.register(workspace, name, tmp_path)


@pytest.mark.parametrize("url", ["ftp://host/x", "s3://", "nonsense://x", "http:///x"])
def test_invalid_datastore_url_is_refused(workspace, url):
    with pytest.raises(DataError, match=r"no kind that is known|names no bucket or host"):
        Datastore.register(workspace, "lab", url)


@pytest.mark.parametrize(
    ("url", "kind", "azure_type", "container"),
    [
        ("s3://bucket/pre", "s3", "S3", "bucket"),
        ("abfs://box@account.dfs.core.windows.net/x", "azure", "AzureBlob", "box"),
        ("gs://bucket", "gcs", "GCS", "bucket"),
        ("sftp://me@host/x", "sftp", "SFTP", None),
        ("https://host/x", "http", "HTTP", None),
        ("file:///some/folder", "local", "Local", None),
    ],
)
def test_kind_of_a_store_follows_from_its_url(workspace, monkeypatch, url, kind, azure_type, container):
    monkeypatch.setattr("paceline.data.stores.datastore.check_installed", lambda record: None)
    store = Datastore.register(workspace, "lab", url)
    assert (store.kind, store.datastore_type, store.container_name) == (kind, azure_type, container)
    assert store.account_name == ("account" if kind == "azure" else None)


def test_missing_extra_of_a_store_is_named_in_the_error(workspace, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"needs adlfs, which is not installed.*pip install 'paceline\[azure\]'"):
        Datastore.register(workspace, "lab", "az://box/x")


def test_plain_text_secret_is_refused_and_not_stored(workspace):
    with pytest.raises(DataError, match="in the clear"):
        Datastore.register(workspace, "lab", "s3://bucket", options={"secret": "planted"})
    with pytest.raises(DataError, match="not shown here"):
        Datastore.register(workspace, "lab", "s3://bucket", credentials={"secret": "planted"})
    assert not list((workspace.path).rglob("lab.json"))


def test_datastore_record_has_references_to_secrets_but_no_secrets(workspace, monkeypatch):
    monkeypatch.setenv("LAB_SECRET", "planted")
    Datastore.register(workspace, "lab", "s3://bucket", credentials={"secret": "env:LAB_SECRET"})
    text = (workspace.path / "datastores/lab.json").read_text()
    assert json.loads(text) == {"url": "s3://bucket", "options": {}, "credentials": {"secret": "env:LAB_SECRET"}}


def test_damaged_datastore_record_is_named_in_the_error(workspace):
    write_tree(workspace.path, {"datastores/lab.json": "{half"})
    with pytest.raises(DataError, match=r"lab.json' can't be read as a datastore"):
        Datastore.get(workspace, "lab")


def test_datastore_refuses_a_workspace_argument_that_is_no_workspace():
    with pytest.raises(DataError, match="is not a workspace"):
        Datastore(7, "lab")


def test_a_store_is_pickled_and_printed_without_connections(workspace, tmp_path):
    store = Datastore.register(workspace, "lab", tmp_path)
    assert pickle.loads(pickle.dumps(store)) == store
    assert repr(store) == f"Datastore({workspace!r}, 'lab')"


def test_data_references_get_valid_input_names(workspace, tmp_path):
    store = Datastore.register(workspace, "my-lab", tmp_path)
    assert store.path("/train set/*.csv").name == "my_lab_train_set_csv"
    assert store.path("x", data_reference_name="mine").name == "mine"
    assert Datastore.register(workspace, "1st", tmp_path).path().name == "_1st"
    assert store.path("x").sources == (Source(datastore="my-lab", path="x"),)
    assert [store.as_mount().mode, store.as_download("d").mode, store.as_upload().mode] == [
        "mount",
        "download",
        "upload",
    ]
    assert store.as_download("d").path_on_compute == "d"


def test_files_uploaded_to_a_datastore_are_downloaded_with_the_same_bytes(workspace, objects, bucket, tmp_path):
    objects.bucket(bucket)
    store = s3_store(workspace, objects.url, bucket)
    write_tree(tmp_path / "src", FILES)
    reference = store.upload(tmp_path / "src", "in/here", show_progress=False)
    assert reference.sources == (Source(datastore="lab", path="in/here"),)
    assert store.download(tmp_path / "out", show_progress=False) == 3
    assert {name: (tmp_path / "out/in/here" / name).read_bytes() for name in FILES} == FILES


def test_upload_replaces_files_only_with_overwrite(workspace, tmp_path):
    store = Datastore.get_default(workspace)
    write_tree(tmp_path / "src", {"a": "old"})
    store.upload(tmp_path / "src", "x")
    write_tree(tmp_path / "src", {"a": "new", "b": "more"})
    store.upload(tmp_path / "src", "x")
    assert [(workspace.path / "data/x" / name).read_text() for name in "ab"] == ["old", "more"]
    store.upload(tmp_path / "src", "x", overwrite=True)
    assert (workspace.path / "data/x/a").read_text() == "new"


def test_download_replaces_files_only_with_overwrite(workspace, tmp_path):
    write_tree(workspace.path, {"data/x/a": "new"})
    write_tree(tmp_path, {"out/x/a": "old"})
    store = Datastore.get_default(workspace)
    assert store.download(tmp_path / "out") == 0
    assert (tmp_path / "out/x/a").read_text() == "old"
    assert store.download(tmp_path / "out", overwrite=True) == 1
    assert (tmp_path / "out/x/a").read_text() == "new"


def test_upload_files_keeps_paths_relative_to_the_common_or_given_folder(workspace, tmp_path):
    write_tree(tmp_path, {"src/a/x": "1", "src/b/y": "2"})
    store, files = Datastore.get_default(workspace), [tmp_path / "src/a/x", tmp_path / "src/b/y"]
    store.upload_files(files, target_path="one")
    store.upload_files(files, relative_root=tmp_path, target_path="two")
    store.upload_files(files[:1], target_path="three")
    assert [info.path for info in store.files()] == ["one/a/x", "one/b/y", "three/x", "two/src/a/x", "two/src/b/y"]
    with pytest.raises(DataError, match="is not below relative_root"):
        store.upload_files(files, relative_root=tmp_path / "src/a")
    with pytest.raises(DataError, match="is not a file"):
        store.upload_files([tmp_path / "src"])


def test_upload_to_an_http_store_is_refused(workspace, tmp_path):
    write_tree(tmp_path / "src", {"a": "1"})
    with pytest.raises(DataError, match="HTTP can only be read from"):
        Datastore.register(workspace, "web", "http://127.0.0.1:9").upload(tmp_path / "src")


def test_download_does_not_follow_symlinks_in_its_target(workspace, tmp_path):
    write_tree(workspace.path, {"data/sub/a": "1"})
    (tmp_path / "out").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out/sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TransferError, match="is a link that leads out of it"):
        Datastore.get_default(workspace).download(tmp_path / "out")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_datastore_download_to_a_full_disk_raises_and_leaves_no_truncated_file(workspace, small_disk):
    write_tree(workspace.path, {"data/a": b"x" * 100_000})
    fill_disk(small_disk)
    with pytest.raises(TransferError, match=r"no room|No space"):
        Datastore.get_default(workspace).download(small_disk / "out")
    assert not (small_disk / "out/a").exists()


def test_files_uploaded_to_a_memory_store_are_listed_and_downloaded_in_the_same_process(workspace, bucket, tmp_path):
    store = Datastore.register(workspace, "mem", f"memory://{bucket}")
    write_tree(tmp_path / "src", FILES)
    store.upload(tmp_path / "src")
    assert {info.path for info in store.files()} == set(FILES)
    assert store.download(tmp_path / "out") == 3


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda ws: Datastore.register(ws, "x", 3), "url=3 of datastore 'x' must be a URL"),
        (lambda ws: Datastore.register(ws, "x", "/x", options="a"), "options='a' of datastore 'x' is not a dict"),
        (
            lambda ws: Datastore.register(ws, "x", "/x", credentials="env:X"),
            "credentials='env:X' of datastore 'x' is not",
        ),
        (lambda ws: Datastore.register(ws, "x", "/x", default="yes"), "default='yes' is not a bool"),
        (lambda ws: Datastore(ws).upload("x", overwrite="no"), "overwrite='no' is not a bool"),
        (lambda ws: Datastore(ws).upload(3), "3 is not a path"),
        (lambda ws: Datastore(ws).download(3), "3 is not a path"),
        (lambda ws: Datastore(ws).path("x").as_upload(overwrite="no"), "overwrite='no'"),
    ],
)
def test_datastore_arguments_of_a_wrong_type_are_refused(workspace, call, said):
    with pytest.raises(DataError, match=re.escape(said)):
        call(workspace)
