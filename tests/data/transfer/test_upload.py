"""What a run leaves: stored whole, in each kind of store, and refused before it starts where it can't be."""

from __future__ import annotations

import os
import shutil

import pytest

from paceline.data.stores.datastore import Datastore
from paceline.data.stores.filesystem import Store, place_of
from paceline.data.transfer.upload import check_upload, files_below, put_files, upload_output
from paceline.errors import DataError, TransferError
from paceline.job.data_reference import Source
from tests.data.conftest import OBJECT_STORES, OTHER_STORES, s3_store, server_of
from tests.helpers import fill_disk, write_tree

FILES = {"model.pt": b"weights" * 1000, "logs/a b ü.txt": b"text", "logs/empty": b""}


@pytest.fixture(params=["local", "s3", *OTHER_STORES, "sftp"])
def store(request, workspace, tmp_path):
    """An empty store of each kind."""
    if request.param in OBJECT_STORES:
        server, name = server_of(request), request.getfixturevalue("bucket")
        server.bucket(name)
        return s3_store(workspace, server.url, f"{name}/out")
    if request.param == "sftp":
        sshd = request.getfixturevalue("sshd")
        return Datastore.register(workspace, "lab", sshd.url(tmp_path / "far"), options=sshd.options())
    return Datastore.register(workspace, "lab", tmp_path / "near")


@pytest.fixture
def folder(tmp_path):
    return write_tree(tmp_path / "result", FILES)


def upload(reference, folder, *, workspace_dir):
    """Store these files as the output of a run."""
    run_dir = folder.parent / f"run-{folder.name}"
    shutil.rmtree(run_dir, ignore_errors=True)
    shutil.copytree(folder, run_dir / "uploads" / reference.name, symlinks=True)
    return upload_output(reference, run_dir, workspace_dir=workspace_dir)


def stored(store):
    return {info.path: info.size for info in store.files()}


SIZES = {f"run 1/{name}": len(content) for name, content in FILES.items()}


def test_uploaded_files_are_downloaded_unchanged(store, folder, workspace, tmp_path):
    reference = store.path("run 1").as_upload()
    check_upload(reference, workspace.path)
    done = upload(reference, folder, workspace_dir=workspace.path)
    assert (done.files, done.bytes) == (3, 7004)
    assert stored(store) == SIZES, "and nothing that a check or an unfinished write left"
    store.download(tmp_path / "back", show_progress=False)
    assert {name: (tmp_path / "back/run 1" / name).read_bytes() for name in FILES} == FILES


def test_run_is_refused_if_its_output_files_exist_already(store, folder, workspace):
    reference = store.path("run 1").as_upload()
    upload(reference, folder, workspace_dir=workspace.path)
    with pytest.raises(DataError, match=r"there are 3 files already, such as 'logs/a b ü.txt'.*overwrite=True"):
        check_upload(reference, workspace.path)
    check_upload(store.path("run 1").as_upload(overwrite=True), workspace.path)
    assert stored(store) == SIZES


def test_upload_replaces_a_file_stored_by_another_program_since_the_check_only_with_overwrite(store, folder, workspace):
    reference = store.path("run 1").as_upload()
    check_upload(reference, workspace.path)
    upload(reference, write_tree(folder.parent / "other", {"model.pt": b"theirs"}), workspace_dir=workspace.path)
    with pytest.raises(DataError, match=r"'model.pt'; they were not replaced.*stays in"):
        upload(reference, folder, workspace_dir=workspace.path)
    assert stored(store) == {"run 1/model.pt": 6}
    upload(store.path("run 1").as_upload(overwrite=True), folder, workspace_dir=workspace.path)
    assert stored(store) == SIZES


@pytest.mark.parametrize(("url", "reason"), [("http://127.0.0.1:9", "can only be read"), ("memory://x", "one process")])
def test_run_with_an_output_in_a_read_only_store_is_refused(workspace, url, reason):
    store = Datastore.register(workspace, "lab", url)
    with pytest.raises(DataError, match=reason):
        check_upload(store.path("x").as_upload(), workspace.path)


def test_run_with_an_unwritable_output_folder_is_refused(workspace, tmp_path):
    (tmp_path / "file").write_text("in the way")
    store = Datastore.register(workspace, "lab", tmp_path / "file")
    with pytest.raises(TransferError, match=r"writing to 'x/y' in datastore 'lab'.* failed"):
        check_upload(store.path("x/y").as_upload(), workspace.path)


def test_run_with_an_output_in_a_missing_bucket_is_refused(workspace, s3_once):
    with pytest.raises(TransferError, match="there is no such bucket"):
        check_upload(s3_store(workspace, s3_once.url, "no-such-bucket").path("x").as_upload(), workspace.path)


def test_upload_to_a_full_disk_leaves_no_partial_file(workspace, folder, small_disk):
    store = Datastore.register(workspace, "lab", small_disk)
    fill_disk(small_disk)
    with pytest.raises(TransferError, match="no space is left there"):
        upload(store.path("run 1").as_upload(), folder, workspace_dir=workspace.path)
    assert not [
        path for path in small_disk.rglob("*") if path.is_file() and path.stat().st_size and path.name != "filler"
    ]


def test_upload_is_retried_after_http_status_503(workspace, s3_once, bucket, proxied, folder):
    s3_once.bucket(bucket)
    fails = [1, 1]

    def fail(answer) -> None:
        if answer.method == "PUT" and fails:
            fails.pop()
            answer.status, answer.body, answer.headers = 503, b"", {"Content-Length": "0"}

    store = s3_store(workspace, proxied(s3_once.port, fail).url, bucket)
    upload(store.path("run 1").as_upload(), folder, workspace_dir=workspace.path)
    assert stored(store) == SIZES


def test_upload_follows_symlinks_and_skips_special_files(tmp_path):
    write_tree(tmp_path, {"out/a": "1", "other/b": "2"})
    (tmp_path / "out/linked").symlink_to(tmp_path / "other")
    (tmp_path / "out/up").symlink_to(tmp_path / "out")
    (tmp_path / "out/nowhere").symlink_to(tmp_path / "no")
    os.mkfifo(tmp_path / "out/pipe")
    assert [name for name, _ in files_below(tmp_path / "out")] == ["a", "linked/b"]


def test_uploaded_output_follows_links_only_to_files_of_the_run(workspace, tmp_path):
    store = Datastore.register(workspace, "lab", tmp_path / "near")
    reference, said = store.path("up", "model").as_upload(), []
    top = write_tree(
        tmp_path / "run", {"uploads/model/a": "1", "checkpoints/9.pt": "nine", "state.json": "{}", "work/w": "w"}
    )
    write_tree(tmp_path, {"mine/id_rsa": "secret"})
    for name, target in {
        "best.pt": "../../checkpoints/9.pt",
        "here": top / "uploads/model/a",
        "w": "../../work/w",
        "secret": tmp_path / "mine/id_rsa",
        "mine": tmp_path / "mine",
        "record": "../../state.json",
        "up": ".",
        "nowhere": "no",
        "round": "round",
    }.items():
        (top / "uploads/model" / name).symlink_to(target)
    os.mkfifo(top / "uploads/model/pipe")
    done = upload_output(reference, top, workspace_dir=workspace.path, say=said.append)
    assert stored(store) == {"up/a": 1, "up/best.pt": 4, "up/here": 1, "up/w": 1}
    assert dict(done.left_out) == {
        "secret": f"a link that leads out of the run, to {str(tmp_path / 'mine/id_rsa')!r}",
        "mine": f"a link that leads out of the run, to {str(tmp_path / 'mine')!r}",
        "record": "a link that leads out of the run, to '../../state.json'",
        "up": "a link to '.', a folder that it lies in",
        "nowhere": "a link to 'no', where there is nothing",
        "round": "a link to 'round', which leads in a circle",
        "pipe": "a pipe",
    }
    assert "output 'model': 'pipe' is a pipe, and is left out" in said


def test_run_file_replaced_by_a_symlink_is_refused_at_upload(workspace, tmp_path):
    store = Datastore.register(workspace, "lab", tmp_path / "near")
    write_tree(tmp_path, {"run/a": "1", "mine": "secret"})
    (tmp_path / "run/a").unlink()
    (tmp_path / "run/a").symlink_to(tmp_path / "mine")
    record, _ = place_of(Source(datastore="lab", path=""), workspace.path)
    with Store(record) as opened, pytest.raises(TransferError, match="'a' was a file of the run, and is a link now"):
        put_files(opened, "up", [("a", tmp_path / "run/a")], are_plain=True)
    assert stored(store) == {}


def test_file_name_that_is_not_utf8_is_refused_before_upload(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / os.fsdecode(b"\xff")).write_text("x")
    with pytest.raises(DataError, match="is not UTF-8"):
        files_below(tmp_path / "out")
