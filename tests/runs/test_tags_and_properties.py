from __future__ import annotations

import pytest

from paceline.errors import RunStateError, UserError
from paceline.runs import tags_and_properties
from paceline.system.files import append_line
from tests.helpers import start_python


@pytest.fixture
def path(tmp_path):
    return tmp_path / "notes.jsonl"


def test_missing_tags_file_reads_as_no_tags(path):
    assert tags_and_properties.read(path) == tags_and_properties.Notes()


def test_last_value_set_for_a_tag_is_returned(path):
    tags_and_properties.set_tags(path, {"lr": 0.1, "best": None})
    tags_and_properties.set_tags(path, {"lr": "0.2"})
    assert tags_and_properties.read(path).tags == {"lr": "0.2", "best": None}


def test_tag_value_is_converted_to_a_string(path):
    tags_and_properties.set_tags(path, {"a": 5, "b": True, "c": [1]})
    assert tags_and_properties.read(path).tags == {"a": "5", "b": "True", "c": "[1]"}


def test_removed_tag_of_a_run_can_be_set_again(path):
    tags_and_properties.set_tags(path, {"a": 1, "b": 2})
    tags_and_properties.remove_tags(path, ["a", "never"])
    assert tags_and_properties.read(path).tags == {"b": "2"}
    tags_and_properties.set_tags(path, {"a": 3})
    assert tags_and_properties.read(path).tags == {"b": "2", "a": "3"}


def test_change_of_a_property_of_a_run_is_refused(path):
    tags_and_properties.add_properties(path, {"commit": "abc", "n": 1})
    with pytest.raises(RunStateError, match="property 'commit' is 'abc' already"):
        tags_and_properties.add_properties(path, {"new": "x", "commit": "def"})
    assert tags_and_properties.read(path).properties == {"commit": "abc", "n": "1"}


def test_display_name_can_change(path):
    for name in ("first", "second"):
        tags_and_properties.set_name(path, "display_name", name)
    tags_and_properties.set_name(path, "description", "text")
    found = tags_and_properties.read(path)
    assert (found.display_name, found.description) == ("second", "text")


@pytest.mark.parametrize("key", ["", None, 5])
def test_empty_or_non_string_tag_or_property_name_is_refused(path, key):
    with pytest.raises(UserError, match="not a non-empty string"):
        tags_and_properties.set_tags(path, {key: "x"})
    with pytest.raises(UserError, match="not a non-empty string"):
        tags_and_properties.add_properties(path, {key: "x"})
    assert tags_and_properties.read(path) == tags_and_properties.Notes()


@pytest.mark.parametrize("key", ["value", "tag", "untag", "display_name", "ü\n\"'"])
def test_any_text_can_be_a_tag_or_property_name(path, key):
    tags_and_properties.set_tags(path, {key: "x"})
    tags_and_properties.add_properties(path, {key: "y"})
    assert (tags_and_properties.read(path).tags, tags_and_properties.read(path).properties) == ({key: "x"}, {key: "y"})


def test_concurrent_adds_of_one_property_let_one_succeed(path):
    code = """
import sys
from pathlib import Path
from paceline.errors import RunStateError
from paceline.runs import tags_and_properties as notes
won = 0
for number in range(50):
    try: notes.add_properties(Path(sys.argv[1]), {f"p{number}": sys.argv[2]}); won += 1
    except RunStateError: pass
print(won)
"""
    started = [start_python(code, path, name) for name in "ab"]
    assert sum(int(process.communicate()[0]) for process in started) == 50
    assert len(tags_and_properties.read(path).properties) == 50


def test_comments_are_listed_in_order_with_author_and_time_and_can_be_removed(path, monkeypatch):
    first = tags_and_properties.add_comment(path, "  Too fast?\r\nYes.\n")
    monkeypatch.setattr(tags_and_properties, "user_name", lambda: "bob")
    second = tags_and_properties.add_comment(path, "x" * 2000)
    assert list(tags_and_properties.read(path).comments.values()) == [first, second]
    assert (first.text, second.author) == ("Too fast?\nYes.", "bob")
    assert first.time_utc.startswith("20")
    tags_and_properties.remove_comment(path, first.id)
    assert list(tags_and_properties.read(path).comments) == [second.id]
    with pytest.raises(UserError, match=r"there is no comment .* `paceline comment RUN` prints the ids"):
        tags_and_properties.remove_comment(path, first.id)


@pytest.mark.parametrize("text", ["", " \n", "x" * 2001])
def test_comment_has_1_to_2000_characters(path, text):
    with pytest.raises(UserError, match="a comment has 1 to 2000 characters, got"):
        tags_and_properties.add_comment(path, text)
    assert not path.exists()


def test_only_author_owner_and_admin_remove_a_comment(path, monkeypatch):
    comment = tags_and_properties.add_comment(path, "mine")
    with monkeypatch.context() as patch:
        patch.setattr(tags_and_properties, "user_name", lambda: "bob")
        patch.setattr("os.geteuid", lambda: 54321)
        with pytest.raises(UserError, match=f"comment {comment.id} is of {comment.author}"):
            tags_and_properties.remove_comment(path, comment.id)
        tags_and_properties.remove_comment(path, comment.id, is_admin=True)
    comment = tags_and_properties.add_comment(path, "mine")
    monkeypatch.setattr("os.geteuid", lambda: 54321)
    tags_and_properties.remove_comment(path, comment.id)
    assert tags_and_properties.read(path).comments == {}


def test_comments_with_damaged_fields_are_omitted_and_overlong_fields_truncated(path):
    good = {"id": "a", "author": "n" * 300, "time_utc": "t" * 300, "text": "x" * 9000}
    for line in (
        {"comment": good},
        {"comment": "text"},
        {"comment": {**good, "id": 5}},
        {"comment": {**good, "text": "2"}},
    ):
        append_line(path, line)
    (found,) = tags_and_properties.read(path).comments.values()
    assert (len(found.author), len(found.time_utc), len(found.text)) == (200, 30, 2000)


@pytest.mark.parametrize(
    "line",
    [
        '{"tag": "a", "value": [1]}',
        '{"property": "b", "value": 2}',
        '{"display_name": ["x"]}',
        '{"drawn_name": 4}',
        '{"description": {}}',
        "[" * 100_000,
    ],
)
def test_note_of_an_unexpected_form_is_skipped(path, line):
    tags_and_properties.set_tags(path, {"a": "1"})
    for name in ("display_name", "drawn_name", "description"):
        tags_and_properties.set_name(path, name, "good")
    before = tags_and_properties.read(path)
    with open(path, "a") as file:
        file.write(f"{line}\n")
    assert tags_and_properties.read(path) == before
