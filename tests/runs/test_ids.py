from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from paceline.errors import FileNameError, WorkspaceError
from paceline.runs.ids import age_key, check_experiment_name, check_run_id, is_trial, new_run_id


def test_a_new_id_is_the_experiment_the_second_and_eight_hex_digits():
    assert re.fullmatch(r"digits_\d{10}_[0-9a-f]{8}", new_run_id("digits"))


def test_ids_differ():
    assert len({new_run_id("digits") for _ in range(2000)}) == 2000


def test_ids_of_one_second_sort_in_the_order_they_were_made():
    # The story: runs that were submitted within one second were numbered and listed at random.
    made = []
    for _ in range(20):
        made.append(new_run_id("digits"))
        time.sleep(0.001)
    assert made == sorted(made)


@pytest.mark.parametrize("run_id", ["digits_1700000000_00000001", "a", "A.b-c_d", "9", "x" * 255])
def test_an_id_is_taken(run_id):
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
def test_what_is_no_id_is_refused(run_id):
    with pytest.raises(FileNameError, match="starts with a letter or digit") as refused:
        check_run_id(run_id)
    assert repr(run_id) in str(refused.value)


@pytest.mark.parametrize("name", ["a" * 200, "A-b_c"])
def test_an_experiment_s_name_is_taken(name):
    assert check_experiment_name(name) == name


def test_the_longest_name_makes_an_id_that_is_one():
    check_run_id(new_run_id(check_experiment_name("x" * 200)))


def test_too_long_a_name_is_refused():
    with pytest.raises(WorkspaceError, match="at most 200"):
        check_experiment_name("a" * 201)


def test_the_runs_of_trials_are_told_from_others_and_sort_behind_their_sweep():
    sweep = "a_1_12345678_1700000000_12345678"
    assert [is_trial(f"{sweep}{tail}") for tail in ("", "_3", "_3_2", "_3_2_1")] == [False, True, True, True]
    assert not is_trial(f"{sweep}_3_2_1_0")
    # A pipeline, a step that is a sweep, and the trials of that.
    assert sorted([f"{sweep}{tail}" for tail in ("_1_1", "_1_0_2", "_1", "_2", "", "_1_0")], key=age_key) == [
        f"{sweep}{tail}" for tail in ("", "_1", "_1_0", "_1_0_2", "_1_1", "_2")
    ]
    names = [sweep, f"{sweep}_3", f"{sweep}_3_2", f"{sweep}_3_10", f"{sweep}_20"]
    assert sorted([*names[2:], *names[:2]], key=age_key) == names
