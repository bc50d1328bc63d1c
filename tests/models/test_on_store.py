"""Versions on a datastore: pushed and pulled whole, interrupted and continued, and refused if the contents differ."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

import paceline as pl
from paceline.data.stores.datastore import Datastore
from paceline.data.stores.filesystem import Store, place_of
from paceline.data.transfer import blobs
from paceline.data.transfer.upload import put_new
from paceline.errors import DataError, ModelChangedError, ModelError, ModelNotFoundError, TransferError
from paceline.job.data_reference import Source
from paceline.models import on_store, registry
from tests.data import servers
from tests.data.conftest import OBJECT_STORES, OTHER_STORES, s3_store, server_of
from tests.helpers import write_tree

FILES = {"weights": b"w" * 100_000, "sub/config.json": b"{}", "empty": b"", "again": b"{}"}
LAB = on_store.place("lab")


@pytest.fixture(autouse=True)
def settings(tmp_path, monkeypatch):
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    given = {
        "AWS_ACCESS_KEY_ID": servers.KEY,
        "AWS_SECRET_ACCESS_KEY": servers.SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in {**given, "HOME": str(tmp_path / "home")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("paceline.data.transfer.transfer._FIRST_DELAY_S", 0.01)
    monkeypatch.setattr("paceline.data.transfer.upload._FIRST_DELAY_S", 0.01)


@pytest.fixture
def workspace(tmp_path):
    return pl.Workspace(tmp_path / "ws")


@pytest.fixture
def other(tmp_path, workspace):
    """Somebody else's workspace, which has nothing yet."""
    return pl.Workspace(tmp_path / "other")


@pytest.fixture(params=["local", "s3", *OTHER_STORES, "sftp"])
def store(request, workspace, other, tmp_path):
    """An empty store "lab" of each kind, in both workspaces."""
    for one in (workspace, other):
        if request.param in OBJECT_STORES:
            server = server_of(request)
            if one is workspace:
                server.bucket(request.getfixturevalue("bucket"))
            made = s3_store(one, server.url, f"{request.getfixturevalue('bucket')}/team")
        elif request.param == "sftp":
            sshd = request.getfixturevalue("sshd")
            made = Datastore.register(one, "lab", sshd.url(tmp_path / "far"), options=sshd.options())
        else:
            made = Datastore.register(one, "lab", tmp_path / "near")
    return made


@pytest.fixture
def near(workspace, other, tmp_path):
    """A store that is a folder."""
    for one in (workspace, other):
        Datastore.register(one, "lab", tmp_path / "near")
    return tmp_path / "near/models"


@pytest.fixture
def model(workspace, tmp_path):
    model = pl.Model.register(
        workspace, write_tree(tmp_path / "made", FILES), "digits", {"a": 1, "bare": None}, {"seed": 3}, "what it is"
    )
    model.set_alias("production")
    return model


@pytest.mark.promise("version-goes-another-workspace-datastore")
def test_pushed_version_equals_the_pulled_one(store, model, workspace, other):
    pushed = on_store.push(workspace.path, model.record, LAB)
    assert (pushed.stored, pushed.is_new) == (3, True), "equal files are one content"
    assert on_store.listed(other.path, LAB) == [("digits", 1)]
    assert sorted({info.path.split("/")[1] for info in store.files()}) == [".blobs", "digits"]

    assert on_store.pull(other.path, LAB, "digits", 1) == model.record
    came = pl.Model(other, "digits")
    came.verify()
    assert (came.tags, came.properties, came.description) == ({"a": "1", "bare": None}, {"seed": "3"}, "what it is")
    assert came.aliases == [], "those are each workspace's own"
    assert os.listdir(registry.parts_dir(other.path)) == []
    assert (came.artifact / "sub/config.json").stat().st_ino == (came.artifact / "again").stat().st_ino

    again = on_store.push(workspace.path, model.record, LAB)
    assert (again.stored, again.stored_bytes, again.is_new) == (0, 0, False)
    assert on_store.pull(other.path, LAB, "digits", 1) == model.record


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_push_and_pull_accept_a_path_or_url_without_a_datastore(
    model, workspace, other, tmp_path, monkeypatch, s3_once, bucket, kind
):
    if kind == "s3":
        s3_once.bucket(bucket)
        monkeypatch.setenv("AWS_ENDPOINT_URL", s3_once.url)
    where = f"s3://{bucket}/team/models" if kind == "s3" else str(tmp_path / "shared")
    assert model.push(where)
    assert not model.push(where)
    assert on_store.listed(other.path, on_store.place(where)) == [("digits", 1)]
    came = pl.Model.pull(other, where, "digits", 1)
    assert (came.id, came.record) == ("digits:1", model.record)
    came.verify()


def test_version_registered_after_a_pull_is_one_above_the_pulled_version(near, model, workspace, other, tmp_path):
    second = pl.Model.register(workspace, tmp_path / "made", "digits")
    on_store.push(workspace.path, second.record, LAB)
    on_store.pull(other.path, LAB, "digits", 2)
    assert pl.Model.register(other, tmp_path / "made", "digits").version == 3


def test_push_and_pull_never_replace_a_different_model_of_the_same_name_and_version(
    store, model, workspace, other, tmp_path
):
    write_tree(tmp_path / "made", {"weights": b"other"})
    mine = pl.Model.register(other, tmp_path / "made", "digits")
    on_store.push(workspace.path, model.record, LAB)
    with pytest.raises(ModelError, match=r"there is another model digits:1 in .*: registered .* by .*, digest"):
        on_store.push(other.path, mine.record, LAB)
    with pytest.raises(ModelError, match=r"there is another model digits:1 here: registered"):
        on_store.pull(other.path, LAB, "digits", 1)
    assert on_store.pull(workspace.path, LAB, "digits", 1) == model.record


def test_second_write_of_an_existing_file_name_to_the_model_store_is_refused(store, workspace):
    record, path = place_of(Source(datastore="lab", path="models/x"), workspace.path)
    with Store(record) as opened:
        assert [put_new(opened, data, path) for data in (b"1", b"2")] == [True, False]
        assert on_store.read_bytes(opened, path) == b"1"
        assert on_store.read_bytes(opened, "models/nix") is None
    assert [info.path for info in store.files()] == ["models/x"]


def test_only_one_of_several_concurrent_writers_creates_a_file(store, workspace):
    if store.kind == "sftp":
        pytest.skip("SFTP has no request that creates a file only if no file has its name")
    record, path = place_of(Source(datastore="lab", path="lock"), workspace.path)

    def write(number):
        with Store(record) as opened:
            assert opened.kind == "local" or opened.fs
            start.wait()
            return put_new(opened, b"%d" % number, path)

    start = threading.Barrier(8)
    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(write, range(8))) == [False] * 7 + [True]


@pytest.mark.promise("version-goes-another-workspace-datastore")
def test_interrupted_push_resumes_with_remaining_files(near, model, workspace, monkeypatch):
    real, stored = blobs.put_files, []

    def broken(store, path, files, progress, **how):
        stored.append([name for name, _ in files])
        real(store, path, files[:1], progress, **how)
        raise TransferError("the line is down")

    with monkeypatch.context() as patch:
        patch.setattr(blobs, "put_files", broken)
        with pytest.raises(TransferError, match="the line is down"):
            on_store.push(workspace.path, model.record, LAB)
    assert on_store.listed(workspace.path, LAB) == [], "there is no version without its record"
    pushed = on_store.push(workspace.path, model.record, LAB)
    assert (len(stored[0]), pushed.stored, pushed.is_new) == (3, 2, True)


@pytest.mark.promise("push-s3-broke-off-within")
def test_interrupted_push_resumes_within_a_large_file(
    workspace, other, tmp_path, s3_once, bucket, proxied, monkeypatch
):
    """A model is mostly one large file, and a push that broke off began with that again."""
    monkeypatch.setattr("paceline.data.transfer.upload._TRIES", 1)
    monkeypatch.setattr("paceline.data.stores.s3.PART_BYTES", 5 << 20)  # S3's minimum size of a part
    monkeypatch.setattr("paceline.data.stores.s3._AT_ONCE", 1)
    s3_once.bucket(bucket)
    sent, is_down = [], [True]

    def cut(answer):
        if answer.method == "PUT" and "partNumber=" in answer.path:
            sent.append(answer.path.partition("partNumber=")[2].partition("&")[0])
            if is_down and len(sent) > 1:
                answer.status = 503

    s3_store(workspace, f"http://127.0.0.1:{proxied(s3_once.port, cut).port}", bucket)
    made = write_tree(tmp_path / "made", {"weights": os.urandom((15 << 20) + 7)})
    model = pl.Model.register(workspace, made, "digits")
    with pytest.raises(TransferError):
        on_store.push(workspace.path, model.record, LAB)
    assert on_store.listed(workspace.path, LAB) == []
    before, sent[:], is_down[:] = sent[:], [], []
    # An uploaded part with different bytes must not be used for this file.
    with Store(place_of(LAB, workspace.path)[0]) as there:
        to = {"Bucket": bucket, "Key": f"models/.blobs/{model.record.files[0].sha256}"}
        [begun] = there.fs.call_s3("list_multipart_uploads", Bucket=bucket)["Uploads"]
        there.fs.call_s3("upload_part", **to, UploadId=begun["UploadId"], PartNumber=2, Body=bytes(5 << 20))
    sent.clear()
    assert on_store.push(workspace.path, model.record, LAB).stored == 1
    assert "1" in before
    assert "1" not in sent, "what had come is not sent again"
    assert {"2", "4"} <= {*sent}
    s3_store(other, s3_once.url, bucket)
    on_store.pull(other.path, LAB, "digits", 1)
    pl.Model(other, "digits").verify()


def test_second_push_of_a_version_with_verify_reports_no_upload(store, model, workspace):
    assert not [model.push("lab", verify=True) for _ in range(2)][1]


def test_push_uploads_a_file_again_if_its_copy_in_the_store_is_truncated(near, model, workspace):
    on_store.push(workspace.path, model.record, LAB)
    (blob,) = (path for path in (near / ".blobs").iterdir() if path.stat().st_size == 100_000)
    blob.write_bytes(b"w" * 10)
    assert on_store.push(workspace.path, model.record, LAB).stored == 1
    assert blob.stat().st_size == 100_000


@pytest.mark.promise("version-goes-another-workspace-datastore")
def test_interrupted_pull_resumes(workspace, other, tmp_path, s3_once, bucket, proxied, monkeypatch):
    monkeypatch.setattr("paceline.data.transfer.transfer._TRIES", 1)
    s3_once.bucket(bucket)
    s3_store(workspace, s3_once.url, bucket)
    size = 3_000_000
    made = write_tree(tmp_path / "made", {"weights": os.urandom(size)})
    model = pl.Model.register(workspace, made, "digits")
    on_store.push(workspace.path, model.record, LAB)

    cuts = []

    def cut(answer):
        if answer.method == "GET" and f".blobs/{model.record.files[0].sha256}" in answer.path:
            answer.cut_after = 0 if cuts else size // 2
            cuts.append(answer.path)

    s3_store(other, f"http://127.0.0.1:{proxied(s3_once.port, cut).port}", bucket)
    with pytest.raises(TransferError):
        on_store.pull(other.path, LAB, "digits", 1)
    parts = [path.stat().st_size for path in (registry.parts_dir(other.path) / "pulled").iterdir()]
    assert sum(parts) >= size // 4, "what has come is kept"
    assert on_store.listed(other.path, LAB) == [("digits", 1)]
    assert registry.versions_of(other.path).names() == []

    proxy = proxied(s3_once.port)
    s3_store(other, f"http://127.0.0.1:{proxy.port}", bucket)
    on_store.pull(other.path, LAB, "digits", 1)
    assert any(asked and not asked.startswith("bytes=0-") for _, path, asked in proxy.requests if ".blobs/" in path)
    pl.Model(other, "digits").verify()
    assert os.listdir(registry.parts_dir(other.path)) == []


@pytest.mark.promise("lies-store-model-another-one", "push-s3-broke-off-within")
def test_pull_of_a_file_damaged_in_the_store_is_refused(near, model, workspace, other):
    on_store.push(workspace.path, model.record, LAB)
    (blob,) = (path for path in (near / ".blobs").iterdir() if path.stat().st_size == 100_000)
    blob.write_bytes(b"x" * 100_000)
    with pytest.raises(
        ModelChangedError, match=r"'made/weights' of model digits:1 in .* has another content.*--verify"
    ):
        on_store.pull(other.path, LAB, "digits", 1)
    assert registry.versions_of(other.path).names() == []
    # The size of the damaged file is unchanged, so a push without verify=True regards it as intact.
    assert on_store.push(workspace.path, model.record, LAB).stored == 0
    assert on_store.push(workspace.path, model.record, LAB, verify=True).stored == 1
    assert blob.read_bytes() == b"w" * 100_000
    blob.unlink()
    with pytest.raises(ModelChangedError, match=r"'made/weights' of model digits:1 is not whole in"):
        on_store.pull(other.path, LAB, "digits", 1)
    assert on_store.push(workspace.path, model.record, LAB).stored == 1
    on_store.pull(other.path, LAB, "digits", 1)


def spoilt(**changes):
    def spoil(data):
        return {**data, **changes}

    return spoil


def with_name(name):
    def spoil(data):
        return {**data, "files": [{**data["files"][0], "name": name}, *data["files"][1:]]}

    return spoil


@pytest.mark.promise("lies-store-model-another-one")
@pytest.mark.parametrize(
    "spoil",
    [
        with_name("made/../../../../evil"),
        with_name("/etc/passwd"),
        with_name("other/weights"),
        with_name("made/sub"),
        spoilt(files=[]),
        spoilt(digest="0" * 64),
        spoilt(version=2),
        spoilt(top=3),
        lambda data: [],
        lambda data: {},
    ],
    ids=range(10),
)
def test_tampered_record_in_store_is_refused(near, model, workspace, other, spoil, tmp_path):
    """A store may be written by others: none of its names leads anywhere."""
    on_store.push(workspace.path, model.record, LAB)
    path = near / "digits/1/model.json"
    path.write_text(json.dumps(spoil(json.loads(path.read_text()))))
    with pytest.raises((ModelError, DataError)):
        on_store.pull(other.path, LAB, "digits", 1)
    assert not (other.path / "models").exists() or registry.versions_of(other.path).names() == []
    assert not [*tmp_path.rglob("evil")]


def test_pull_of_a_missing_model_version_raises_and_the_error_lists_the_existing_versions(
    near, model, workspace, other
):
    with pytest.raises(ModelNotFoundError, match=r"there is no model digits:1 in .*\. There are: none\."):
        on_store.pull(other.path, LAB, "digits", 1)
    on_store.push(workspace.path, model.record, LAB)
    with pytest.raises(
        ModelNotFoundError, match=r"no model digits:2 in .*\. Did you mean 'digits:1'\? There are: digits:1\."
    ):
        on_store.pull(other.path, LAB, "digits", 2)


def test_model_changed_on_disk_is_not_pushed_to_a_store(near, model, workspace):
    path = model.artifact / "weights"
    path.chmod(0o644)
    path.write_bytes(b"spoilt")
    with pytest.raises(ModelChangedError, match="have changed since its registration"):
        on_store.push(workspace.path, model.record, LAB)
    assert not near.exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lab", Source(datastore="lab", path="models")),
        ("lab:a/b", Source(datastore="lab", path="a/b")),
        ("lab:", Source(datastore="lab", path="")),
        ("s3://bucket/models", Source(path="s3://bucket/models")),
        ("/mnt/models", Source(path="/mnt/models")),
    ],
)
def test_text_of_a_model_store_location_is_parsed(text, expected):
    assert on_store.place(text) == expected


@pytest.mark.parametrize("text", ["", "./here", "a b", ":x"])
def test_invalid_model_store_location_is_refused(text):
    with pytest.raises(ModelError, match=r"is not a place of models\. Write STORE, STORE:PATH or a URL"):
        on_store.place(text)
