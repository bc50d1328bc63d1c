from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest

from paceline.runs.folder import RunFolder
from paceline.supervisor.logs import LogWatch, NewFiles, make_logs


@pytest.fixture
def listed(monkeypatch):
    """The folders that were listed."""
    found: list[str] = []
    listdir = os.listdir

    def note(path):
        found.append(path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", note)
    return found


def test_each_new_log_file_is_reported_once(tmp_path):
    news = NewFiles(tmp_path)
    (tmp_path / "a").touch()
    assert news.look() == {"a"}
    (tmp_path / "b").touch()
    assert news.look() == {"b"}
    assert news.look() == set()


def test_unchanged_log_folder_is_not_listed_again(tmp_path, listed):
    os.utime(tmp_path, (time.time() - 60,) * 2)
    news = NewFiles(tmp_path)
    for _ in range(3):
        news.look()
    assert listed == [str(tmp_path)]


def test_log_folder_that_changed_just_now_is_listed_again(tmp_path, listed):
    news = NewFiles(tmp_path)
    for _ in range(3):
        news.look()
    assert listed == [str(tmp_path)] * 3


def test_missing_log_folder_has_no_new_files(tmp_path):
    assert NewFiles(tmp_path / "none").look() == set()


def test_link_to_a_log_that_fails_leaves_no_temporary_link(tmp_path, monkeypatch):
    # Regression: after an I/O error, the hidden link `logs/.link` stayed in the run's folder.
    folder = RunFolder(tmp_path / "run")
    folder.logs.mkdir(parents=True)

    def fail(source, target):
        raise OSError(5, "Input/output error")

    # Create a link for the first attempt, because the second attempt only replaces existing links.
    make_logs(folder, SimpleNamespace(attempt=1, places=[SimpleNamespace(rank=0)]))
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="Input/output"):
        make_logs(folder, SimpleNamespace(attempt=2, places=[SimpleNamespace(rank=0)]))
    assert os.listdir(folder.logs) == ["rank_0.log"]


@pytest.fixture
def make_watch(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.logs.mkdir(parents=True)
    places = [SimpleNamespace(rank=rank) for rank in range(3)]
    launch = SimpleNamespace(attempt=1, job=SimpleNamespace(log_limit=0), places=places)
    make_logs(folder, launch)
    made = []

    def make(**options):
        made.append(LogWatch(launch, folder, keeps_limits=False, **options))
        return folder, made[-1]

    yield make
    for watch in made:
        watch._order.close()


def indexed(folder):
    """(rank, size) of each growth."""
    return [tuple(map(int, line.split()[1:])) for line in folder.log_order(1).read_text().splitlines()]


def test_growth_of_a_log_is_recorded_in_the_line_order_file_and_visible_in_the_live_log(make_watch):
    folder, watch = make_watch()
    folder.rank_log(1, 1).write_text("one\n")
    watch.look(())
    assert indexed(folder) == [(1, 4)]
    assert folder.live_log(1).read_text() == "one\n"


def test_only_logs_that_grew_are_examined_if_their_names_are_known(make_watch, monkeypatch):
    grown = {"attempts/1/rank_2.log", "attempts/1/log_order.txt", "attempts/2/rank_0.log", "metrics/rank_1.jsonl"}
    folder, watch = make_watch(grown=lambda: grown)
    folder.rank_log(1, 2).write_text("two\n")
    examined = []
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda path, **options: examined.append(path) or stat(path, **options))
    watch.look(())
    assert indexed(folder) == [(2, 4)]
    assert [path for path in examined if str(path).endswith(".log")] == [str(folder.rank_log(1, 2))]


def test_log_of_a_rank_started_by_a_script_is_recorded_and_visible_as_a_live_log(make_watch):
    folder, watch = make_watch()
    folder.rank_log(1, 7).write_text("seven\n")
    watch.look({"rank_7.log", "start_7.json"})
    assert indexed(folder) == [(7, 6)]
    assert folder.live_log(7).read_text() == "seven\n"


def test_last_log_growth_is_recorded_in_the_line_order_file_when_the_log_watch_closes(make_watch):
    folder, watch = make_watch()
    watch._next_s = float("inf")
    folder.rank_log(1, 0).write_text("last\n")
    watch.look(())
    assert indexed(folder) == []
    watch.close()
    assert indexed(folder) == [(0, 5)]
