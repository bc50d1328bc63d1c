"""The cache: what is read from it, what is removed first, and what is never removed."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from paceline.data.transfer.cache import DataCache, parse_size
from paceline.data.transfer.partial import claim
from paceline.errors import DataError
from tests.helpers import run_python, start_python


def put(cache: DataCache, name: str, content: bytes, used_s: float = 0.0) -> str:
    """A whole file in the cache, last used so many seconds ago; its key."""
    key = cache.key("store", name, "1", len(content))
    partial = claim(cache.part(key), len(content), wait=False)
    assert partial is not None
    partial.write(content, 0)
    partial.mark(0, len(content))
    cache.keep(key, partial)
    found = os.stat(cache._path(key))
    os.utime(cache._path(key), ns=(time.time_ns() - int(used_s * 1e9), found.st_mtime_ns))
    return key


def test_cached_file_is_linked_to_the_input_folder_with_read_only_mode(cache, tmp_path):
    key = put(cache, "a", b"hello")
    assert cache.link(key, 5, str(tmp_path / "seen"))
    assert (tmp_path / "seen").read_bytes() == b"hello"
    assert (tmp_path / "seen").stat().st_mode & 0o777 == 0o444


@pytest.mark.parametrize("content", [b"HELLO", b"hello again", b""])
def test_cached_file_modified_by_a_script_is_not_reused(cache, tmp_path, content):
    key = put(cache, "a", b"hello")
    cache.link(key, 5, str(tmp_path / "seen"))
    (tmp_path / "seen").chmod(0o644)
    (tmp_path / "seen").write_bytes(content)
    assert not cache.link(key, 5, str(tmp_path / "again"))
    assert not (tmp_path / "again").exists()
    assert (tmp_path / "seen").read_bytes() == content, "the script keeps what it wrote"


def test_cache_key_of_a_file_depends_on_its_datastore_its_version_and_its_size(cache):
    keys = {
        cache.key(*values)
        for values in (("s", "p", "1", 1), ("s", "p", "2", 1), ("s", "p", "1", 2), ("t", "p", "1", 1))
    }
    assert len(keys) == 4


@pytest.mark.promise("least-recently-used-goes-first")
def test_prune_removes_the_least_recently_used_file_first(cache, tmp_path):
    keys = {name: put(cache, name, bytes(100), used_s) for name, used_s in (("old", 300), ("mid", 200), ("new", 100))}
    cache.link(keys["old"], 100, str(tmp_path / "used"))
    (tmp_path / "used").unlink()
    assert cache.prune(250) == 100
    assert {name for name, key in keys.items() if cache.has(key, 100)} == {"old", "new"}


@pytest.mark.promise("least-recently-used-goes-first")
def test_data_cache_prune_keeps_files_linked_by_a_run(cache, tmp_path):
    key = put(cache, "a", bytes(100), 1000)
    cache.link(key, 100, str(tmp_path / "seen"))
    put(cache, "b", bytes(100))
    assert cache.prune(0) == 100
    assert cache.has(key, 100)
    assert cache.use().linked_bytes == 100


def test_data_cache_removes_least_recently_used_files_to_make_room(tmp_path):
    cache = DataCache(tmp_path / "c", limit_bytes=250)
    first, second = put(cache, "a", bytes(100), 200), put(cache, "b", bytes(100), 100)
    cache.make_room(100)
    assert (cache.has(first, 100), cache.has(second, 100)) == (False, True)


def test_cached_input_folders_of_dead_runs_are_removed(cache):
    held = cache.hold_view("living")
    for run in ("living", "dead"):
        cache.view_dir(run, 0).mkdir(parents=True)
    cache.drop_dead_views()
    assert cache.view_dir("living", 0).is_dir()
    assert not cache.view_dir("dead", 0).exists()
    os.close(held)
    cache.drop_dead_views()
    assert not cache.view_dir("living", 0).exists()


def test_cached_input_folders_of_remote_supervisors_stay_until_their_run_ends(cache):
    for run in ("elsewhere", "running", "forgotten"):
        assert cache.is_unheld(run)
        fd = cache.hold_view(run)
        cache.view_dir(run, 0).mkdir(parents=True)
        cache.note_unheld(fd)
        os.close(fd)
    for run in ("running", "forgotten"):
        os.utime(cache.views / ".held" / run, (0, 0))  # simulates that the view was prepared long ago
    code = "print('there', flush=True); import time; time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PACELINE_RUN_ID": "running"}, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        cache.drop_dead_views()
    finally:
        process.kill()
        process.communicate()
    assert [cache.view_dir(run, 0).is_dir() for run in ("elsewhere", "running", "forgotten")] == [True, True, False]
    cache.drop_views("elsewhere")
    cache.drop_dead_views()
    assert sorted(path.name for path in cache.views.iterdir()) == [".held"]
    assert list((cache.views / ".held").iterdir()) == []


def test_cached_input_folder_is_removed_by_the_first_cleanup_after_its_supervisor_was_killed(cache):
    held = cache.hold_view("here")
    assert not cache.is_unheld("here")
    cache.view_dir("here", 0).mkdir(parents=True)
    os.close(held)
    cache.drop_dead_views()
    assert not cache.view_dir("here", 0).exists()


def test_cached_input_folder_of_a_killed_run_is_removed_by_the_next_run(cache):
    code = (
        "import sys, time; from pathlib import Path; from paceline.data.transfer.cache import DataCache\n"
        "cache = DataCache(Path(sys.argv[1])); cache.hold_view('run_1'); cache.view_dir('run_1', 0).mkdir(parents=True)\n"
        "print('held', flush=True); time.sleep(60)"
    )
    process = start_python(code, cache.folder)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        cache.drop_dead_views()
        assert cache.view_dir("run_1", 0).is_dir()
    finally:
        process.kill()
        process.communicate()
    cache.drop_dead_views()
    assert not cache.view_dir("run_1", 0).exists()


def test_removing_a_cached_input_folder_does_not_follow_symlinks(cache, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("stays")
    view = cache.view_dir("run_1", 0)
    (view / "closed").mkdir(parents=True)
    (view / "closed/own").write_text("goes")
    (view / "link").symlink_to(tmp_path / "precious")
    (view / "closed").chmod(0o500)
    cache.drop_views("run_1")
    assert not view.parent.exists()
    assert (tmp_path / "precious/file").read_text() == "stays"


@pytest.mark.parametrize("run_id", ["", "..", "a/b", ".held", "a\nb"])
def test_invalid_run_id_for_input_folders_is_refused(cache, run_id):
    with pytest.raises(DataError, match="run id"):
        cache.drop_views(run_id)


def test_abandoned_partial_files_are_removed_unless_locked(cache):
    keys = ["a" * 64, "b" * 64, "c" * 64]
    held = claim(cache.part(keys[0]), 10, wait=False)
    claim(cache.part(keys[1]), 10, wait=False).close()
    claim(cache.part(keys[2]), 10, wait=False).close()
    for key in keys[:2]:
        os.utime(cache.part(key), (0, 0))
    cache.prune(10**9)
    assert [cache.part(key).exists() for key in keys] == [True, False, True]
    held.close()


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("100GB", 100 * 10**9),
        ("1.5 TiB", 3 * 2**39),
        ("10 kB", 10_000),
        ("7", 7),
        ("2KiB", 2048),
        ("3M", 3 * 10**6),
        ("5b", 5),
    ],
)
def test_size_text_is_parsed_into_bytes(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1", "1 PB", "1e9", "GB"])
def test_invalid_size_text_is_refused(text):
    with pytest.raises(DataError, match="is not a size"):
        parse_size(text)


def test_cache_folder_and_limit_are_read_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("PACELINE_DATA_CACHE", str(tmp_path / "named"))
    monkeypatch.setenv("PACELINE_DATA_CACHE_LIMIT", "3GB")
    cache = DataCache()
    assert (cache.folder, cache.limit_bytes) == (tmp_path / "named", 3 * 10**9)
    monkeypatch.setenv("PACELINE_DATA_CACHE_LIMIT", "3 elephants")
    with pytest.raises(DataError, match=r"PACELINE_DATA_CACHE_LIMIT: '3 elephants' is not a size"):
        DataCache()
    monkeypatch.delenv("PACELINE_DATA_CACHE")
    monkeypatch.delenv("PACELINE_DATA_CACHE_LIMIT")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert DataCache().folder == tmp_path / "xdg/paceline/data"


def test_cache_folder_that_cannot_be_created_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="PACELINE_DATA_CACHE"):
        DataCache(tmp_path / "file" / "cache")


def test_concurrent_processes_create_and_remove_cached_input_folders_without_errors(cache):
    code = (
        "import os, sys; from pathlib import Path; from paceline.data.transfer.cache import DataCache\n"
        "cache = DataCache(Path(sys.argv[1]))\n"
        "for number in range(30):\n"
        "    run = f'run_{sys.argv[2]}_{number}'; fd = cache.hold_view(run); cache.view_dir(run, 0).mkdir(parents=True)\n"
        "    cache.drop_dead_views()\n"
        "    assert cache.view_dir(run, 0).is_dir()\n"
        "    os.close(fd)\n"
    )
    processes = [start_python(code, cache.folder, number) for number in range(3)]
    assert [process.wait(180) for process in processes] == [0, 0, 0]
    for process in processes:
        process.stdout.close()
    run_python("import sys; from pathlib import Path; from paceline.data.transfer.cache import DataCache\n"
               "DataCache(Path(sys.argv[1])).drop_dead_views()", cache.folder)  # fmt: skip
    assert [entry.name for entry in cache.views.iterdir()] == [".held"]
    assert not list((cache.views / ".held").iterdir())
