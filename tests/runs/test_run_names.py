"""Each run gets a readable name, which no other run of its experiment has had."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.errors import RunNotFoundError
from paceline.runs import run_names, store, tags_and_properties
from paceline.runs.folder import RunFolder
from tests.helpers import make_run

NAME = r"[a-z]+-[a-z]+-\d+"


def test_name_follows_from_the_id(tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
    first, same = (run_names.take(tmp_path / place, "digits", "digits_1_00000001") for place in ("a", "b"))
    assert re.fullmatch(NAME, first)
    assert first == same
    assert run_names.take(tmp_path / "a", "digits", "digits_1_00000002") != first


def test_no_name_comes_twice_in_an_experiment(tmp_path: Path) -> None:
    # One id stands for ids that happen to draw the same names.
    names = [run_names.take(tmp_path, "digits", "digits_1_00000001") for _ in range(150)]
    assert len(set(names)) == 150
    # Experiments are apart.
    assert run_names.take(tmp_path, "words", "digits_1_00000001") == names[0]


def test_programs_that_submit_at_once_share_no_name(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from paceline.runs import run_names\n"
        "for _ in range(40): print(run_names.take(pathlib.Path(sys.argv[1]), 'digits', 'digits_1_00000001'))"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    names = [name for one in started for name in one.communicate()[0].split()]
    assert (len(names), len(set(names))) == (160, 160)


def test_names_of_removed_runs_stay_taken(tmp_path: Path) -> None:
    folder, fd = make_run(tmp_path / "runs")
    os.close(fd)
    name = tags_and_properties.read(folder.notes).name
    assert name in (tmp_path / "names" / "digits").read_text().split()


def test_name_is_unique_where_the_list_of_names_is_another_user_s(tmp_path: Path) -> None:
    (tmp_path / "names").write_text("not a folder")
    names = [run_names.take(tmp_path, "digits", f"digits_1_0000000{number}") for number in range(5)]
    assert len(set(names)) == 5
    assert all(re.fullmatch(NAME, name) for name in names)


def test_run_is_found_by_its_name(tmp_path: Path) -> None:
    runs_dir = tmp_path / "runs"
    folders: list[RunFolder] = []
    for number in (1, 2):
        folder, fd = make_run(runs_dir, f"digits_170000000{number}_0000000{number}")
        os.close(fd)
        folders.append(folder)
    name = tags_and_properties.read(folders[0].notes).name
    assert store.find(runs_dir, str(name)) == folders[0]
    for folder in folders:
        tags_and_properties.set_name(folder.notes, "display_name", "the best so far")
    with pytest.raises(RunNotFoundError, match=r"2 runs are called 'the best so far': digits_.*Give an id"):
        store.find(runs_dir, "the best so far")
    # A name that was replaced finds nothing.
    with pytest.raises(RunNotFoundError):
        store.find(runs_dir, str(name))
