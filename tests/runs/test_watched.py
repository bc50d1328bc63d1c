from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.workspace import Experiment, Workspace


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Experiment(Workspace(tmp_path / ".paceline"), "e")


def test_files_written_to_outputs_and_logs_during_the_run_are_kept(experiment):
    Path("outputs").mkdir()
    Path("outputs/before.txt").write_text("of another run")
    with experiment.start_logging() as run:
        Path("outputs/deep").mkdir()
        Path("outputs/deep/model.txt").write_text("1")
        Path("logs").mkdir()
        Path("logs/mine.log").write_text("line")
        assert run.get_file_names() == ["logs/mine.log", "outputs/deep/model.txt"]
        Path("outputs/deep/model.txt").write_text("12")
        os.symlink("/etc/passwd", "outputs/link")
        os.mkfifo("outputs/pipe")
    assert run.get_file_names() == ["logs/mine.log", "outputs/deep/model.txt"]
    assert Path(run.download_file("outputs/deep/model.txt", "copy.txt")).read_text() == "12"


def test_start_logging_accepts_another_outputs_folder_or_no_outputs_folder(experiment):
    with experiment.start_logging(outputs=False):
        pass
    assert not Path("outputs").exists()
    with experiment.start_logging(outputs="kept") as run:
        Path("kept/a.txt").write_text("1")
    assert run.get_file_names() == ["outputs/a.txt"]


def test_manually_uploaded_output_is_listed_once(experiment):
    with experiment.start_logging() as run:
        Path("outputs/a.txt").write_text("1")
        run.upload_file("outputs/a.txt", "outputs/a.txt")
    assert run.get_file_names() == ["outputs/a.txt"]


def test_start_logging_creates_a_run_with_the_given_id(experiment):
    assert experiment.start_logging(outputs=False, run_id="mine_1").id == "mine_1"
