from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import FileNameError
from paceline.runs.folder import RunFolder, check_file_name

FOLDER = RunFolder(Path("/ws/runs/digits_1700000000_00000001"))


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
def test_file_name_of_a_run_loses_leading_dots_and_double_slashes_and_is_otherwise_kept(name, plain):
    assert check_file_name(name) == plain


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "/", "/etc/passwd", "../a", "a/../b", "outputs/..", "a/./../..", "a\0b", None, 5, Path("a")],
    ids=repr,
)
def test_file_name_that_is_empty_invalid_or_leads_out_of_the_run_folder_is_refused(name):
    with pytest.raises(FileNameError) as refused:
        check_file_name(name)
    assert repr(name) in str(refused.value)


@pytest.mark.promise("file-name-leaves-run-s")
@given(st.text(st.sampled_from("a./\\ \0"), max_size=12))
def test_every_accepted_file_name_gives_a_path_inside_the_run_folder(name):
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
        ("state.json", "artifacts/state.json"),
        ("metrics/rank_0.jsonl", "artifacts/metrics/rank_0.jsonl"),
    ],
)
def test_uploaded_file_can_not_replace_a_file_of_paceline_in_the_run(name, place):
    assert FOLDER.file(name) == FOLDER.path / place


def test_run_folder_has_the_documented_file_names():
    assert FOLDER.run_id == "digits_1700000000_00000001"
    names = {
        "job.json": FOLDER.job,
        "state.json": FOLDER.state,
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
