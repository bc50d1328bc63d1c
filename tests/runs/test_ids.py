from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.errors import FileNameError, RunNotFoundError, WorkspaceError
from paceline.runs import ids, store, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.ids import age_key, check_experiment_name, check_run_id, is_trial, new_run_id
from tests.helpers import make_run

NAME = r"[a-z]+-[a-z]+-\d+"


def test_new_run_id_has_experiment_unix_seconds_and_eight_hex_digits():
    assert re.fullmatch(r"digits_\d{10}_[0-9a-f]{8}", new_run_id("digits"))


def test_new_run_ids_are_unique():
    assert len({new_run_id("digits") for _ in range(2000)}) == 2000


def test_run_ids_created_within_one_second_sort_by_creation():
    # Regression: runs that were submitted within one second were numbered and listed in random order.
    made = []
    for _ in range(20):
        made.append(new_run_id("digits"))
        time.sleep(0.001)
    assert made == sorted(made)


@pytest.mark.parametrize("run_id", ["digits_1700000000_00000001", "a", "A.b-c_d", "9", "x" * 255])
def test_valid_run_id_is_accepted(run_id):
    assert check_run_id(run_id) == run_id


@pytest.mark.parametrize(
    "run_id",
    [
        "",
        ".",
        "..",
        "../a",
        "a/../b",
        "a/b",
        "/a",
        ".hidden",
        "_a",
        "-a",
        "a b",
        "a\n",
        "a\0",
        "ü",
        "x" * 256,
        None,
        5,
        Path("a"),
    ],
    ids=repr,
)
def test_invalid_run_id_is_refused(run_id):
    with pytest.raises(FileNameError, match="starts with a letter or digit") as refused:
        check_run_id(run_id)
    assert repr(run_id) in str(refused.value)


@pytest.mark.parametrize("name", ["a" * 200, "A-b_c"])
def test_valid_experiment_name_is_accepted(name):
    assert check_experiment_name(name) == name


def test_longest_experiment_name_makes_a_valid_run_id():
    check_run_id(new_run_id(check_experiment_name("x" * 200)))


def test_experiment_name_over_200_characters_is_refused():
    with pytest.raises(WorkspaceError, match="at most 200"):
        check_experiment_name("a" * 201)


def test_trial_ids_are_recognized_and_sort_behind_their_sweep():
    sweep = "a_1_12345678_1700000000_12345678"
    assert [is_trial(f"{sweep}{tail}") for tail in ("", "_3", "_3_2", "_3_2_1")] == [False, True, True, True]
    assert not is_trial(f"{sweep}_3_2_1_0")
    # These are the ids of a pipeline, of its step that is a sweep, and of the trials of this sweep.
    assert sorted([f"{sweep}{tail}" for tail in ("_1_1", "_1_0_2", "_1", "_2", "", "_1_0")], key=age_key) == [
        f"{sweep}{tail}" for tail in ("", "_1", "_1_0", "_1_0_2", "_1_1", "_2")
    ]
    names = [sweep, f"{sweep}_3", f"{sweep}_3_2", f"{sweep}_3_10", f"{sweep}_20"]
    assert sorted([*names[2:], *names[:2]], key=age_key) == names


def test_run_name_is_derived_from_its_id(tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
    first, same = (ids.take_name(tmp_path / place, "digits", "digits_1_00000001") for place in ("a", "b"))
    assert re.fullmatch(NAME, first)
    assert first == same
    assert ids.take_name(tmp_path / "a", "digits", "digits_1_00000002") != first


@pytest.mark.promise("run-readable-name-other-run")
def test_run_names_are_unique_within_an_experiment(tmp_path: Path) -> None:
    # The same id always draws the same names, so only the first call gets its first choice.
    names = [ids.take_name(tmp_path, "digits", "digits_1_00000001") for _ in range(150)]
    assert len(set(names)) == 150
    # Each experiment has its own names.
    assert ids.take_name(tmp_path, "words", "digits_1_00000001") == names[0]


@pytest.mark.promise("run-readable-name-other-run")
def test_programs_that_submit_concurrently_get_different_run_names(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from paceline.runs import ids\n"
        "for _ in range(40): print(ids.take_name(pathlib.Path(sys.argv[1]), 'digits', 'digits_1_00000001'))"
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


def test_run_name_is_unique_even_if_another_user_owns_the_list_of_names(tmp_path: Path) -> None:
    (tmp_path / "names").write_text("not a folder")
    names = [ids.take_name(tmp_path, "digits", f"digits_1_0000000{number}") for number in range(5)]
    assert len(set(names)) == 5
    assert all(re.fullmatch(NAME, name) for name in names)


@pytest.mark.promise("run-readable-name-other-run")
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
    # The run was renamed, so its old name finds nothing.
    with pytest.raises(RunNotFoundError):
        store.find(runs_dir, str(name))
