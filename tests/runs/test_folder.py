from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import FileNameError, WorkspaceError
from paceline.runs.folder import RunFolder, check_experiment_name, check_file_name, check_run_id, new_run_id

FOLDER = RunFolder(Path("/ws/runs/digits_1700000000_00000001"))


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


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("outputs/model.pt", "outputs/model.pt"),
        ("./outputs//model.pt", "outputs/model.pt"),
        ("a b/ü'\n;", "a b/ü'\n;"),
        ("...", "..."),
        ("a..b/..c", "a..b/..c"),
        ("-x", "-x"),
        ("outputs/", "outputs"),
    ],
)
def test_a_name_has_one_plain_form(name, plain):
    assert check_file_name(name) == plain


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "/", "/etc/passwd", "../a", "a/../b", "outputs/..", "a/./../..", "a\0b", None, 5, Path("a")],
    ids=repr,
)
def test_a_name_that_leaves_the_folder_is_refused(name):
    with pytest.raises(FileNameError) as refused:
        check_file_name(name)
    assert repr(name) in str(refused.value)


@given(st.text(st.sampled_from("a./\\ \0"), max_size=12))
def test_no_name_leads_out_of_the_run_s_folder(name):
    try:
        path = FOLDER.file(name)
    except FileNameError:
        return
    assert path.is_relative_to(FOLDER.path)
    assert ".." not in path.parts


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("outputs/a/b", "outputs/a/b"),
        ("logs/a", "logs/a"),
        ("plot.png", "artifacts/plot.png"),
        ("outputs.txt", "artifacts/outputs.txt"),
        ("run.json", "artifacts/run.json"),
        ("metrics/rank_0.jsonl", "artifacts/metrics/rank_0.jsonl"),
    ],
)
def test_a_file_can_not_take_the_place_of_the_run_s_own(name, place):
    assert FOLDER.file(name) == FOLDER.path / place


def test_the_files_have_the_names_of_the_design():
    assert FOLDER.run_id == "digits_1700000000_00000001"
    names = {
        "run.json": FOLDER.record,
        "events.jsonl": FOLDER.events,
        "snapshot": FOLDER.snapshot,
        "logs/driver.log": FOLDER.driver_log,
        "logs/rank_3.log": FOLDER.live_log(3),
        "attempts/2/rank_3.log": FOLDER.rank_log(2, 3),
        "metrics/rank_3.jsonl": FOLDER.metric_log(3),
        "metrics/rank_3.2.jsonl": FOLDER.metric_log(3, attempt=2),
        "outputs": FOLDER.outputs,
        "checkpoints": FOLDER.checkpoints,
    }
    assert {str(path.relative_to(FOLDER.path)): path for path in names.values()} == names
