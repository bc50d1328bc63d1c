from __future__ import annotations

import pytest

from paceline.runs import states, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.select import matches
from tests.helpers import make_record


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
def test_every_filter_that_is_given_has_to_pass(folder, filters, passes):
    assert matches(make_record(status=states.RUNNING), folder, **filters) is passes


def test_runs_with_a_parent_pass_only_if_they_are_asked_for(folder):
    child = make_record(parent_run_id="digits_1_1")
    assert not matches(child, folder)
    assert matches(child, folder, children=True)
