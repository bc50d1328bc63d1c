from __future__ import annotations

import os
import time

import pytest

from paceline.supervisor.logs import NewFiles


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


def test_names_are_reported_once(tmp_path):
    news = NewFiles(tmp_path)
    (tmp_path / "a").touch()
    assert news.look() == {"a"}
    (tmp_path / "b").touch()
    assert news.look() == {"b"}
    assert news.look() == set()


def test_unchanged_folder_is_not_listed_again(tmp_path, listed):
    os.utime(tmp_path, (time.time() - 60,) * 2)
    news = NewFiles(tmp_path)
    for _ in range(3):
        news.look()
    assert listed == [str(tmp_path)]


def test_folder_that_changed_just_now_is_listed_again(tmp_path, listed):
    news = NewFiles(tmp_path)
    for _ in range(3):
        news.look()
    assert listed == [str(tmp_path)] * 3


def test_missing_folder_has_no_names(tmp_path):
    assert NewFiles(tmp_path / "none").look() == set()
