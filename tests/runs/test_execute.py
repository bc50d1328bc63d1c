"""The asking program's side of a command beside a worker."""

from __future__ import annotations

import os
import shutil

import pytest

from paceline.runs.execute import Files
from paceline.runs.folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "digits_1_1")
    folder.path.mkdir()
    return folder


@pytest.mark.parametrize("moment", ["before its own folder", "while it is looked for"])
def test_new_exec_request_succeeds_while_another_request_removes_the_shared_folder(folder, monkeypatch, moment):
    """Regression: a request that ended removed the empty folder of all requests just before a new request was written
    into this folder."""
    mkdir, races = os.mkdir, [folder.exec_requests]

    def racing(path, *words, **named):
        if races and moment == "while it is looked for":
            # Simulate a race: the folder of all requests exists when this request makes its own folder, and is removed
            # a moment later.
            races.pop()
            mkdir(folder.exec_requests, 0o700)
            try:
                mkdir(path, *words, **named)
            finally:
                os.rmdir(folder.exec_requests)
        if races and os.path.dirname(path) == str(folder.exec_requests):
            os.rmdir(races.pop())
        mkdir(path, *words, **named)

    monkeypatch.setattr(os, "mkdir", racing)
    files = Files(folder)
    files.begin({"argv": ["true"]})
    assert not races
    (asked,) = folder.exec_requests.iterdir()
    assert os.listdir(asked) == ["request.json"]
    files.close()
    assert not folder.exec_requests.exists()


@pytest.mark.parametrize("gone", ["exec_requests", "path"])
def test_exec_command_started_as_the_run_ends_reports_the_end(folder, monkeypatch, gone):
    rename = os.rename

    def racing(*paths):
        shutil.rmtree(getattr(folder, gone))
        rename(*paths)

    monkeypatch.setattr(os, "rename", racing)
    files = Files(folder)
    files.begin({"argv": ["true"]})
    assert files.receive() == []
    assert files.is_over


@pytest.mark.promise("folder-takes-place-request-paceline")
def test_exec_input_is_not_written_into_a_folder_that_replaced_the_exec_request(folder):
    # Regression: a member of the group replaced the request's folder by another folder, and could read the input that
    # the owner typed.
    files = Files(folder)
    files.begin({"argv": ["passwd"]})
    (path,) = folder.exec_requests.iterdir()
    path.rename(path.with_name("taken"))
    path.mkdir()
    files.send({"data": "aHVzaA=="})
    assert list(path.iterdir()) == []
    assert path.with_name("taken").joinpath("in_0.json").exists()
    assert files.receive() == []
    assert files.is_over
    files.close()
    assert path.is_dir()
