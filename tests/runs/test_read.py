"""Runs as readers see them, and readers' requests to a run's supervisor."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from paceline.errors import RunStateError
from paceline.runs import read, remote_status, removal, states, store, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.read import matches
from tests.helpers import make_record, make_run


def test_cancel_of_another_users_run_is_refused_with_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, fd = make_run(tmp_path, submitted_by="ann")
    os.close(fd)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Let each write fail by a patch, because root may write to every folder.
    monkeypatch.setattr(read, "write_json", refuse)
    with pytest.raises(RunStateError, match=r"belongs to ann, .* Permission denied\. Ask them to cancel it"):
        read.request_cancel(folder, "bob")


def test_removing_or_force_ending_another_users_run_is_refused_with_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Regression: the errors named a supervisor process and advised to try again, instead of naming the run's owner.
    folder, fd = make_run(tmp_path, status=states.CANCELED, submitted_by="ann")
    os.close(fd)
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # root may write to every folder
    with pytest.raises(RunStateError, match=r"belongs to ann, .* Ask them to remove it"):
        removal.remove(folder)
    with pytest.raises(RunStateError, match=r"belongs to ann, .* Ask them to cancel it"):
        remote_status.write_off(folder, "bob")


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path)
    tags_and_properties.set_tags(folder.notes, {"lr": 0.1, "best": None})
    tags_and_properties.add_properties(folder.notes, {"commit": "abc"})
    return folder


@pytest.mark.parametrize(
    ("filters", "passes"),
    [
        ({}, True),
        ({"kind": "script"}, True),
        ({"kind": "interactive"}, False),
        ({"status": "Running"}, True),
        ({"status": "Completed"}, False),
        ({"tags": "best"}, True),
        ({"tags": "lr"}, True),
        ({"tags": "other"}, False),
        ({"tags": {"lr": "0.1"}}, True),
        ({"tags": {"lr": 0.1}}, True),
        ({"tags": {"lr": "0.2"}}, False),
        ({"tags": {"lr": "0.1", "best": None}}, True),
        ({"tags": {"lr": "0.1", "other": None}}, False),
        ({"properties": {"commit": "abc"}}, True),
        ({"properties": {"commit": "def"}}, False),
        ({"properties": {"other": "abc"}}, False),
        ({"tags": {"lr": "0.1"}, "properties": {"commit": "abc"}, "status": "Running", "kind": "script"}, True),
        ({"tags": {"lr": "0.1"}, "properties": {"commit": "abc"}, "status": "Failed"}, False),
    ],
    ids=str,
)
def test_run_matches_only_if_all_given_filters_match(folder, filters, passes):
    assert matches(make_record(status=states.RUNNING), folder, **filters) is passes


def test_child_run_matches_a_filter_only_if_child_runs_are_included(folder):
    child = make_record(parent_run_id="digits_1_1")
    assert not matches(child, folder)
    assert matches(child, folder, children=True)


def two_runs(runs_dir: Path) -> list[RunFolder]:
    made = [make_run(runs_dir, f"digits_1700000000_0000000{n}", states.COMPLETED) for n in (1, 2)]
    for _, fd in made:
        os.close(fd)
    return [folder for folder, _ in made]


@pytest.mark.parametrize(
    "state",
    [
        '{"status": ["x"]}',
        '{"status": "Completed", "started_utc": 5}',
        '{"status": "Completed", "started_utc": "2026-11-30"}',
        '{"status": "Completed", "attempts": [{"number": 1, "started_utc": "soon"}]}',
        '{"status": "Completed", "owner": []}',
        '{"status": "Completed", "exit_code": "x"}',
        "[" * 100_000,
    ],
)
def test_invalid_state_of_one_run_hides_only_this_run_from_lists(tmp_path: Path, state: str) -> None:
    bad, good = two_runs(tmp_path)
    bad.state.write_text(state)
    assert [record.run_id for record in read.all_records(tmp_path)] == [good.run_id]
    read.raw(bad)
    assert store.has_ended(bad) == ('"Completed"' in state)


def test_invalid_field_in_the_fixed_record_of_one_run_hides_only_this_run_from_lists(tmp_path: Path) -> None:
    bad, good = two_runs(tmp_path)
    bad.job.write_text(json.dumps({**json.loads(bad.job.read_text()), "created_utc": 5}))
    assert [record.run_id for record in read.all_records(tmp_path)] == [good.run_id]
