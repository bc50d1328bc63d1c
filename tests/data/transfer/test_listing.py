"""What a reference means in each kind of store: the same files have the same names everywhere."""

from __future__ import annotations

import os
import socket

import pytest

from paceline.data.stores.datastore import Datastore
from paceline.data.transfer.listing import fingerprint, is_single_file, list_files
from paceline.errors import DataError, TransferError
from paceline.job.data_reference import Source
from tests.data.conftest import OBJECT_STORES, OTHER_STORES, s3_store, server_of
from tests.data.servers import OBJECTS_OF_AN_ANSWER
from tests.helpers import write_tree

FILES = {
    "train/a.csv": b"1",
    "train/sub folder/ü é.csv": b"22",
    "train/sub folder/q?#%41*[1].bin": b"333",
    "train/empty": b"",
    "training.txt": b"4444",
    "-rf": b"5",
}


@pytest.fixture(params=["local", "s3", *OTHER_STORES, "sftp", "memory"])
def store(request, workspace, tmp_path):
    """The same files in a store of each kind."""
    if request.param == "local":
        write_tree(tmp_path / "files", FILES)
        return Datastore.register(workspace, "lab", tmp_path / "files")
    if request.param in OBJECT_STORES:
        server, name = server_of(request), request.getfixturevalue("bucket")
        server.bucket(name, {f"pre fix/{key}": content for key, content in FILES.items()})
        return s3_store(workspace, server.url, f"{name}/pre fix")
    if request.param == "memory":
        import fsspec

        name = request.getfixturevalue("bucket")
        for key, content in FILES.items():
            fsspec.filesystem("memory").pipe_file(f"/{name}/{key}", content)
        return Datastore.register(workspace, "lab", f"memory://{name}")
    sshd = request.getfixturevalue("sshd")
    write_tree(tmp_path / "files", FILES)
    return Datastore.register(workspace, "lab", sshd.url(tmp_path / "files"), options=sshd.options())


def names(infos):
    return {info.relative: info.size for info in infos}


def test_whole_store_is_listed_sorted_by_path(store):
    infos = store.files()
    assert [info.path for info in infos] == sorted(FILES)
    assert names(infos) == {name: len(content) for name, content in FILES.items()}
    assert all(info.version for info in infos)


@pytest.mark.parametrize("path", ["train", "train/", "/train", "./train"])
def test_listing_of_a_folder_excludes_siblings_whose_names_begin_with_the_folder_name(store, path):
    assert set(names(store.files(path))) == {"a.csv", "sub folder/ü é.csv", "sub folder/q?#%41*[1].bin", "empty"}


def test_listing_of_a_single_file_has_only_that_file(store, workspace):
    sources = [Source(datastore="lab", path="train/a.csv")]
    infos = list_files(sources, workspace.path)
    assert names(infos) == {"a.csv": 1}
    assert is_single_file(infos, sources, workspace.path)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("train/*.csv", {"a.csv"}),
        ("train/**/*.csv", {"a.csv", "sub folder/ü é.csv"}),
        ("**/ü*", {"train/sub folder/ü é.csv"}),
        ("t*", {"training.txt"}),
        ("train/sub folder/**", {"ü é.csv", "q?#%41*[1].bin"}),
    ],
)
def test_pattern_lists_the_matching_files(store, workspace, pattern, expected):
    sources = [Source(datastore="lab", path=pattern)]
    infos = list_files(sources, workspace.path)
    assert set(names(infos)) == expected
    assert not is_single_file(infos, sources, workspace.path)


@pytest.mark.parametrize("path", ["trai", "no/such", "*.zip", "train/a.csv/b"])
def test_listing_of_a_missing_path_raises(store, path):
    with pytest.raises(DataError, match=r"(there is nothing at|no file matches) .*'lab'"):
        store.files(path)


def test_listing_of_a_path_outside_the_store_is_refused(store):
    with pytest.raises(DataError, match="leaves datastore 'lab'"):
        store.files("train/../../etc")


def test_listing_merges_sources_without_duplicates(store, workspace):
    sources = [Source(datastore="lab", path=path) for path in ("train", "train/a.csv", "training.txt")]
    assert [info.path for info in list_files(sources, workspace.path)] == [
        "train/a.csv", "train/empty", "train/sub folder/q?#%41*[1].bin", "train/sub folder/ü é.csv", "training.txt",
    ]  # fmt: skip


def test_an_absolute_path_and_a_file_url_need_no_datastore(workspace, tmp_path):
    write_tree(tmp_path / "files", FILES)
    for path in (f"{tmp_path}/files/train", f"file://{tmp_path}/files/train"):
        infos = list_files([Source(path=path)], workspace.path)
        assert infos[0].path == f"{tmp_path}/files/train/a.csv"
        assert set(names(infos)) == {"a.csv", "sub folder/ü é.csv", "sub folder/q?#%41*[1].bin", "empty"}


@pytest.mark.parametrize("path", ["relative/path", "ftp://host/file", ""])
def test_source_without_a_datastore_is_refused_unless_its_path_is_absolute_or_a_file_url(workspace, path):
    with pytest.raises(DataError, match="absolute path"):
        list_files([Source(path=path)], workspace.path)


def test_a_password_in_a_plain_url_is_refused_and_not_shown(workspace):
    with pytest.raises(DataError, match="has a password in it") as caught:
        list_files([Source(path="https://me:planted@host/x")], workspace.path)
    assert "planted" not in str(caught.value)


def test_http_store_lists_linked_files_or_a_single_file(web, workspace):
    write_tree(web.folder, FILES)
    store = Datastore.register(workspace, "web", web.url)
    assert names(store.files()) == {name: len(content) for name, content in FILES.items()}
    assert names(store.files("train/sub folder/ü é.csv")) == {"ü é.csv": 2}
    assert names(store.files("train/a.csv")) == {"a.csv": 1}
    assert set(names(store.files("train/*.csv"))) == {"a.csv"}
    [info] = list_files([Source(path=f"{web.url}/train/a.csv")], workspace.path)
    assert (info.path, info.relative) == (f"{web.url}/train/a.csv", "a.csv")
    with pytest.raises(DataError, match="there is nothing there"):
        store.files("no/such/file")


def test_fingerprint_changes_with_the_content_of_an_object(workspace, objects, bucket, tmp_path):
    objects.bucket(bucket, {"x": b"one"})
    store = s3_store(workspace, objects.url, bucket)
    before = store.files()
    assert fingerprint(before) == fingerprint(store.files())
    objects.put(bucket, "x", b"two")
    assert fingerprint(before) != fingerprint(store.files())


@pytest.mark.promise("name-would-leave-folder-refused")
@pytest.mark.parametrize("key", ["../up", "x/../../y", "d//e", "./z"])
def test_error_names_an_object_whose_name_has_dot_or_empty_path_parts(workspace, objects, bucket, key):
    if objects.kind == "azure" and "." in key:
        pytest.skip("clients of Azure resolve dots in a URL's path, so no object has such a name")
    objects.bucket(bucket, {"fine": b"1", key: b"2"})
    with pytest.raises(DataError, match=r"Rename it there") as caught:
        s3_store(workspace, objects.url, bucket).files()
    assert key in str(caught.value)


def test_object_with_an_absolute_name_is_refused_and_not_written(workspace, objects, bucket, take, tmp_path):
    """obstore lists it without its first "/", and then finds that there is no such object."""
    objects.bucket(bucket, {"fine": b"1", f"{tmp_path}/evil": b"2"})
    with pytest.raises(DataError, match=r"Rename it there|there is nothing there"):
        take(s3_store(workspace, objects.url, bucket).path().as_download())
    assert not (tmp_path / "evil").exists()


def test_folder_marker_objects_are_skipped(workspace, objects, bucket):
    objects.bucket(bucket, {"a/": b"", "a/b": b"1", "c": b"", "c/d": b"2"})
    assert [info.path for info in s3_store(workspace, objects.url, bucket).files()] == ["a/b", "c/d"]


@pytest.mark.parametrize("base", ["", "a", "a/empty"])
def test_empty_folder_marker_is_neither_listed_nor_downloaded(workspace, objects, bucket, tmp_path, base):
    # Regression: an object of 0 bytes such as "a/empty/", which marks an empty folder, made every download fail.
    objects.bucket(bucket, {"a/empty/": b"", "a/x": b"1", "a/nothing": b"", "top/": b""})
    store = s3_store(workspace, objects.url, bucket)
    expected = [] if base == "a/empty" else ["a/nothing", "a/x"]
    assert [info.path for info in store.files(base)] == expected
    if expected:
        store.download(tmp_path / "there", prefix=base)
        there = [path for path in (tmp_path / "there").rglob("*") if path.is_file()]
        assert sorted(path.relative_to(tmp_path / "there").as_posix() for path in there) == expected


def test_listing_with_several_response_pages_has_every_object_in_order(workspace, objects, bucket, proxied):
    names = [f"{number:04d}" for number in range(2 * OBJECTS_OF_AN_ANSWER + 5)]
    objects.bucket(bucket, dict.fromkeys(names, b""))
    proxy = proxied(objects.port)
    assert [info.path for info in s3_store(workspace, proxy.url, bucket).files()] == names
    # With fewer requests, the client would have asked for larger pages, and the test would cover only one page.
    if objects.kind == "s3":
        assert len([path for _, path, _ in proxy.requests if "list-type=2" in path]) >= 3


def test_listing_of_an_empty_store_is_empty(workspace, objects, bucket):
    objects.bucket(bucket)
    assert s3_store(workspace, objects.url, bucket).files() == []


def test_listing_raises_for_a_symlink_with_a_too_long_target_but_skips_a_circular_symlink(workspace, tmp_path):
    """Regression: a listing omitted links that this user could not follow, so a run would have started without their
    data."""
    (tmp_path / "files").mkdir()
    # Even root can't follow a link with such a long target. Other links would not fail for root.
    (tmp_path / "files/hidden").symlink_to("x" * 300)
    store = Datastore.register(workspace, "lab", tmp_path / "files")
    with pytest.raises(TransferError, match="too long"):
        store.files()
    (tmp_path / "files/hidden").unlink()
    (tmp_path / "files/itself").symlink_to("itself")
    assert store.files() == []


def test_listing_follows_symlinks_in_a_local_folder_except_circular_ones(workspace, tmp_path):
    write_tree(tmp_path, {"files/own/a": "1", "else/where/b": "2"})
    (tmp_path / "files/linked").symlink_to(tmp_path / "else")
    (tmp_path / "files/own/up").symlink_to(tmp_path / "files")
    (tmp_path / "files/own/nowhere").symlink_to(tmp_path / "no")
    (tmp_path / "else/back").symlink_to(tmp_path / "files/linked")
    listener = socket.socket(socket.AF_UNIX)
    os.chdir(tmp_path / "files")
    listener.bind("socket")
    listener.close()
    store = Datastore.register(workspace, "lab", tmp_path / "files")
    assert [info.path for info in store.files()] == ["linked/where/b", "own/a"]


def test_listing_skips_broken_and_circular_symlinks_but_raises_if_a_symlink_target_is_too_long(workspace, tmp_path):
    write_tree(tmp_path, {"files/a": "1"})
    for name, target in {"nowhere": tmp_path / "no", "itself": "itself", "through a file": "a/b"}.items():
        (tmp_path / "files" / name).symlink_to(target)
    store = Datastore.register(workspace, "lab", tmp_path / "files")
    assert [info.path for info in store.files()] == ["a"]
    # A target that is too long causes an error even for root. A folder without permission would not.
    (tmp_path / "files" / "refused").symlink_to("x" * 300)
    with pytest.raises(TransferError, match="File name too long"):
        store.files()


def test_listing_of_a_store_whose_folder_is_missing_raises(workspace, tmp_path):
    store = Datastore.register(workspace, "lab", tmp_path / "gone")
    with pytest.raises(DataError, match="there is nothing at 'x'"):
        store.files("x")


def test_an_unknown_ssh_host_is_refused(workspace, sshd, tmp_path):
    (tmp_path / "none").write_text("")
    store = Datastore.register(
        workspace, "lab", sshd.url(tmp_path), options=sshd.options(known_hosts=str(tmp_path / "none"))
    )
    with pytest.raises(TransferError, match=r"the host is not known here.*known_hosts"):
        store.files()


def test_a_wrong_ssh_key_is_refused(workspace, sshd, tmp_path):
    import subprocess

    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    store = Datastore.register(
        workspace, "lab", sshd.url(tmp_path), options=sshd.options(key_filename=str(tmp_path / "other"))
    )
    with pytest.raises(TransferError, match="the store refuses these credentials"):
        store.files()


def test_a_wrong_token_of_a_web_server_is_refused(workspace, tmp_path, monkeypatch):
    from tests.data.servers import http_server

    monkeypatch.setenv("WEB_TOKEN", "planted-wrong")
    write_tree(tmp_path / "files", {"a": "1"})
    with http_server(tmp_path / "files", password="right") as port:
        store = Datastore.register(workspace, "web", f"http://127.0.0.1:{port}", credentials={"token": "env:WEB_TOKEN"})
        with pytest.raises(TransferError, match="the store refuses these credentials") as caught:
            store.files("a")
        assert "planted" not in str(caught.value)
        monkeypatch.setenv("WEB_TOKEN", "right")
        assert names(store.files("a")) == {"a": 1}


def test_token_is_sent_together_with_the_stores_headers(workspace, web, proxied, take, monkeypatch):
    """Regression: if a store had a token, the headers in its option client_kwargs were not sent."""
    write_tree(web.folder, {"a.txt": b"a"})
    monkeypatch.setenv("LAB_TOKEN", "right")
    heard: list[dict[str, str]] = []
    store = Datastore.register(
        workspace,
        "lab",
        proxied(web.port, lambda answer: heard.append(answer.request_headers)).url,
        options={"client_kwargs": {"headers": {"X-Project": "digits"}}},
        credentials={"token": "env:LAB_TOKEN"},
    )
    take(store.path("a.txt").as_download())
    assert heard
    assert {(one.get("x-project"), one.get("authorization")) for one in heard} == {("digits", "Bearer right")}
