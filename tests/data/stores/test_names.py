"""Names of stores' files: which may be made below a folder, and what a pattern means."""

from __future__ import annotations

import pytest

from paceline.data.stores.names import check_relative, check_tree, clean_path, pattern_base, pattern_regex
from paceline.errors import DataError


@pytest.mark.parametrize("name", ["a", "a b/ü.txt", "..a/b..", "q'\"\\", "n\nl", "-rf", "*"])
def test_unusual_but_valid_file_name_is_accepted(name):
    assert check_relative(name, "the store") == name


@pytest.mark.promise("name-would-leave-folder-refused")
@pytest.mark.parametrize(
    "name", ["", "..", "../a", "a/../b", "/etc/passwd", "a//b", "a/", "./a", "a\0b", "x" * 256, "é" * 128]
)
def test_invalid_or_absolute_file_name_or_one_with_dot_dot_is_refused(name):
    with pytest.raises(DataError, match="Rename it there"):
        check_relative(name, "the store")


@pytest.mark.parametrize(("path", "cleaned"), [("/a//b/./c", "a/b/c"), ("", ""), ("/", ""), ("a/", "a/"), (".", "")])
def test_repeated_slashes_and_dots_are_removed_from_a_path_in_a_datastore(path, cleaned):
    assert clean_path(path, "the store") == cleaned


@pytest.mark.parametrize("path", ["..", "a/../../b", "a\0"])
def test_path_that_leaves_the_store_is_refused(path):
    with pytest.raises(DataError, match="leaves the store"):
        clean_path(path, "the store")


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("*.csv", "a.csv", True),
        ("*.csv", "a/b.csv", False),
        ("**/*.csv", "a/b/c.csv", True),
        ("**/*.csv", "c.csv", True),
        ("a/**", "a/b/c", True),
        ("a?.txt", "ab.txt", True),
        ("a?.txt", "a/.txt", False),
        ("[ab].txt", "a.txt", False),
        ("[ab].txt", "[ab].txt", True),
        ("*", "n\nl", True),
    ],
)
def test_star_in_a_file_pattern_matches_within_a_folder_and_double_star_across_folders(pattern, path, matches):
    assert bool(pattern_regex(pattern).fullmatch(path)) is matches


def test_base_of_a_pattern_is_its_deepest_folder_without_a_wildcard():
    assert [pattern_base(pattern) for pattern in ("a/b/*.csv", "*", "a*/b", "a/**/c")] == ["a/b", "", "", "a"]


def test_file_list_with_a_name_that_is_both_a_file_and_a_folder_is_refused():
    check_tree(["a/b", "a/c", "ab"], "the store")
    with pytest.raises(DataError, match="'a' in the store is both a file and a folder, which has 'a/b/c'"):
        check_tree(["a", "a/b/c"], "the store")
