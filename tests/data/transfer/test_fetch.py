"""What a run finds: folders of the right files, from each kind of store, once, by node or by rank."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.data.stores.datastore import Datastore
from paceline.data.transfer.cache import DataCache
from paceline.data.transfer.fetch import Fetched
from paceline.errors import DataError
from paceline.job.data_reference import DataReference, Source
from tests.data.conftest import OBJECT_STORES, OTHER_STORES, s3_store, server_of
from tests.helpers import start_python, write_tree

FILES = {f"train/part {number}.bin": bytes([number]) * (number * 1000) for number in range(8)}


@pytest.fixture(params=["s3", *OTHER_STORES, "sftp", "http"])
def far(request, workspace, tmp_path) -> Datastore:
    """The files in a store of another machine."""
    if request.param in OBJECT_STORES:
        server, name = server_of(request), request.getfixturevalue("bucket")
        server.bucket(name, FILES)
        return s3_store(workspace, server.url, name)
    if request.param == "http":
        web = request.getfixturevalue("web")
        write_tree(web.folder, FILES)
        return Datastore.register(workspace, "lab", web.url)
    sshd = request.getfixturevalue("sshd")
    write_tree(tmp_path / "files", FILES)
    return Datastore.register(workspace, "lab", sshd.url(tmp_path / "files"), options=sshd.options())


@pytest.fixture
def near(workspace, tmp_path) -> Datastore:
    write_tree(tmp_path / "files", FILES)
    return Datastore.register(workspace, "lab", tmp_path / "files")


def tree(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


ALL = {name.removeprefix("train/"): content for name, content in FILES.items()}


def test_second_fetch_of_the_same_files_transfers_no_bytes(far, take, cache):
    first = take(far.path("train").as_download())
    assert tree(first.path) == ALL
    assert (first.mode, first.files, first.bytes, first.fetched_bytes) == ("download", 8, 28000, 28000)
    again = take(far.path("train").as_download(), view_dir=cache.view_dir("run_2", 0))
    assert tree(again.path) == ALL
    assert again.fetched_bytes == 0
    assert again.fingerprint == first.fingerprint


def test_unmountable_store_is_downloaded_with_a_note(far, take):
    said: list[str] = []
    fetched = take(far.path("train").as_mount(), say=said.append)
    assert fetched.note == f"as_mount: datastore 'lab' ({far.kind}) can't be mounted here, so its files were downloaded"
    assert any(fetched.note in text for text in said)
    assert tree(fetched.path) == ALL


def test_fetched_single_file_is_a_file_not_a_folder(far, take):
    fetched = take(far.path("train/part 3.bin").as_download())
    assert fetched.path.name == "part 3.bin"
    assert fetched.path.read_bytes() == ALL["part 3.bin"]


@pytest.mark.parametrize("by", ["node", "rank"])
def test_each_node_fetches_only_its_own_part(far, take, tmp_path, by):
    seen: dict[str, bytes] = {}
    came = 0
    for node in range(2):
        own = DataCache(tmp_path / f"cache_{node}")
        fetched = take(
            far.path("train").as_partition(by), cache=own, view_dir=own.view_dir("run_1", node), node_rank=node,
            ranks=range(2 * node, 2 * node + 2),
        )  # fmt: skip
        assert fetched.fetched_bytes == fetched.bytes < 28000
        came += fetched.fetched_bytes
        if by == "rank":
            assert {entry.name for entry in fetched.path.iterdir()} == {f"rank_{2 * node}", f"rank_{2 * node + 1}"}
        for name, content in tree(fetched.path).items():
            relative = name.partition("/")[2] if by == "rank" else name
            assert relative not in seen
            seen[relative] = content
    assert (seen, came) == (ALL, 28000)


def test_rank_whose_part_of_the_partition_has_no_file_gets_an_empty_folder(near, take):
    fetched = take(near.path("train/part 3.bin").as_partition("rank"))
    assert sorted(entry.name for entry in fetched.path.iterdir()) == ["rank_0", "rank_1"]


def test_local_mount_returns_the_original_path(near, take, tmp_path):
    fetched = take(near.path("train").as_mount())
    assert (fetched.path, fetched.mode, fetched.files) == (tmp_path / "files/train", "mount", 8)
    assert take(near.path("train/part 1.bin").as_mount()).path == tmp_path / "files/train/part 1.bin"


def test_symlinked_local_folder_is_mounted_at_its_target(workspace, take, near, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "files")
    assert take(Datastore.register(workspace, "x", tmp_path / "link").path().as_mount()).path == tmp_path / "files"


def test_partition_of_a_local_folder_has_symlinks_to_its_files_without_copies(near, take, cache):
    fetched = take(near.path("train").as_partition("node"))
    assert fetched.mode == "mount"
    assert "nothing was copied" in fetched.note
    assert all(entry.is_symlink() for entry in fetched.path.iterdir())
    assert cache.use().files == 0
    assert 0 < len(tree(fetched.path)) < 8


def test_mounted_pattern_of_a_local_folder_shows_all_matching_files(near, take):
    fetched = take(near.path("train/part ?.bin").as_mount())
    assert tree(fetched.path) == ALL


def test_local_download_is_a_copy_separate_from_the_original(near, take, tmp_path):
    fetched = take(near.path("train").as_download())
    assert tree(fetched.path) == ALL
    assert os.stat(fetched.path / "part 1.bin").st_ino != os.stat(tmp_path / "files/train/part 1.bin").st_ino


@pytest.mark.promise("cached-file-script-wrote-into")
def test_cached_file_modified_by_a_script_is_fetched_again(far, take, cache):
    first = take(far.path("train").as_download())
    (first.path / "part 5.bin").chmod(0o644)
    (first.path / "part 5.bin").write_bytes(b"?" * 5000)
    again = take(far.path("train").as_download(), view_dir=cache.view_dir("run_2", 0))
    assert tree(again.path) == ALL
    assert again.fetched_bytes == 5000


def test_second_attempt_replaces_the_fetched_folder_of_the_first(far, take):
    first = take(far.path("train").as_download())
    (first.path / "left by a script").write_text("x")
    assert tree(take(far.path("train").as_download()).path) == ALL


def test_fetch_from_an_empty_store_raises(workspace, objects, bucket, take):
    objects.bucket(bucket)
    with pytest.raises(DataError, match=r"input 'lab' has no files: datastore 'lab' .* is empty"):
        take(s3_store(workspace, objects.url, bucket).path().as_download())


def test_fetch_raises_if_an_object_name_is_also_a_folder_of_other_objects(workspace, objects, bucket, take):
    objects.bucket(bucket, {"a": b"1", "a/b": b"2"})
    with pytest.raises(DataError, match=r"'a' .* is both a file and a folder, which has 'a/b'"):
        take(s3_store(workspace, objects.url, bucket).path().as_download())


def test_fetching_two_sources_with_an_equal_file_name_raises_data_error(near, workspace, take, tmp_path):
    write_tree(tmp_path / "other", {"part 1.bin": b"x"})
    sources = (Source(datastore="lab", path="train"), Source(path=f"{tmp_path}/other"))
    with pytest.raises(DataError, match=r"has two files 'part 1.bin'"):
        take(DataReference(name="both", sources=sources, mode="download"))


def test_files_of_several_sources_are_fetched_into_one_folder(near, workspace, take, tmp_path):
    write_tree(tmp_path / "other", {"more.bin": b"x"})
    sources = (Source(datastore="lab", path="train"), Source(path=f"{tmp_path}/other"))
    for mode in ("mount", "download"):
        fetched = take(DataReference(name="both", sources=sources, mode=mode))
        assert tree(fetched.path) == {**ALL, "more.bin": b"x"}


def test_fetching_from_a_memory_store_is_refused(workspace, take):
    store = Datastore.register(workspace, "mem", "memory://x")
    with pytest.raises(DataError, match="the memory of one process"):
        take(store.path().as_download())


def test_http_files_without_etag_and_last_modified_are_fetched_again_each_time(workspace, proxied, take, web):
    from tests.data.servers import Answer

    write_tree(web.folder, {"a": b"1"})

    def forget(answer: Answer) -> None:
        for name in ("ETag", "Last-Modified"):
            answer.headers.pop(name, None)

    store = Datastore.register(workspace, "lab", proxied(web.port, forget).url)
    for content in (b"1", b"2"):
        (web.folder / "a").write_bytes(content)
        fetched = take(store.path("a").as_download())
        assert (fetched.path.read_bytes(), fetched.fetched_bytes) == (content, 1)


def test_web_server_without_range_requests_is_read(workspace, proxied, take, web):
    from tests.data.servers import Answer

    write_tree(web.folder, {"a": bytes(range(256)) * 8000})
    cuts = [300_000]

    def plain(answer: Answer) -> None:
        answer.cut_after = cuts.pop() if answer.method == "GET" and cuts else None

    proxy = proxied(web.port, plain)
    send = proxy._pass
    # The server ignores Range headers.
    proxy._pass = lambda handler: (handler.headers.__delitem__("Range"), send(handler))
    fetched = take(Datastore.register(workspace, "lab", proxy.url).path("a").as_download())
    assert fetched.path.read_bytes() == bytes(range(256)) * 8000


@pytest.mark.promise("files-store-there-before-workers")
def test_concurrent_runs_fetch_a_file_only_once(workspace, s3_once, bucket, proxied, cache, monkeypatch):
    files = {f"{number}.bin": bytes([number]) * 50_000 for number in range(20)}
    s3_once.bucket(bucket, files)

    def slow(answer) -> None:
        answer.delay_s = 0.02 if answer.path.endswith(".bin") else 0

    proxy = proxied(s3_once.port, slow)
    s3_store(workspace, proxy.url, bucket)
    code = (
        "import sys; from pathlib import Path; from paceline.workspace import Workspace\n"
        "from paceline.data.transfer.cache import DataCache; from paceline.data.stores.datastore import Datastore\n"
        "from paceline.data.transfer.fetch import fetch\n"
        "workspace, cache = Workspace(sys.argv[1]), DataCache(Path(sys.argv[2]))\n"
        "fetched = fetch(Datastore(workspace, 'lab').path().as_download(), workspace_dir=workspace.path, cache=cache,\n"
        "    view_dir=cache.view_dir(sys.argv[3], 0), node_rank=0, ranks=range(1), node_count=1, world_size=1)\n"
        "print(fetched.files, sum(path.stat().st_size for path in fetched.path.iterdir()))\n"
    )
    processes = [start_python(code, workspace.path, cache.folder, f"run_{number}") for number in range(3)]
    for process in processes:
        text, _ = process.communicate(timeout=180)
        assert text.split() == ["20", "1000000"]
    gets = [path for method, path, _ in proxy.requests if method == "GET" and path.endswith(".bin")]
    assert sorted(gets) == sorted(set(gets))


def test_fetch_after_a_killed_one_downloads_only_the_missing_bytes(workspace, s3_once, bucket, proxied, cache, take):
    s3_once.bucket(bucket, {f"{number}.bin": bytes([number]) * 50_000 for number in range(40)})

    def slow(answer) -> None:
        answer.delay_s = 0.05 if answer.path.endswith(".bin") else 0

    proxy = proxied(s3_once.port, slow)
    store = s3_store(workspace, proxy.url, bucket)
    code = (
        "import sys, os, signal; from pathlib import Path; from paceline.workspace import Workspace\n"
        "from paceline.data.transfer.cache import DataCache; from paceline.data.stores.datastore import Datastore\n"
        "from paceline.data.transfer.fetch import fetch\n"
        "workspace, cache = Workspace(sys.argv[1]), DataCache(Path(sys.argv[2]))\n"
        "fetch(Datastore(workspace, 'lab').path().as_download(), workspace_dir=workspace.path, cache=cache,\n"
        "    view_dir=cache.view_dir('killed', 0), node_rank=0, ranks=range(1), node_count=1, world_size=1,\n"
        "    progress=lambda done, *_: done > 300_000 and os.kill(os.getpid(), signal.SIGKILL))\n"
    )
    process = start_python(code, workspace.path, cache.folder)
    process.communicate(timeout=180)
    assert process.returncode == -9
    kept = cache.use().bytes
    assert kept > 0
    proxy.spoil = lambda answer: None
    fetched: Fetched = take(store.path().as_download())
    assert (fetched.files, fetched.bytes) == (40, 2_000_000)
    assert fetched.fetched_bytes <= 2_000_000 - kept
    assert sorted(path.read_bytes()[:1] for path in fetched.path.iterdir()) == [bytes([number]) for number in range(40)]
    assert not cache.view_dir("killed", 0).exists(), "the dead run's view was dropped"
