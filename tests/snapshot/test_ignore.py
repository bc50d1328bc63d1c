from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from paceline.snapshot.scan import scan
from tests.helpers import write_tree

# Case -> (the files of a tree, the files that the tree's ignore files exclude).
CASES = {
    "a name at any depth": ({".gitignore": "*.csv\n", "a.csv": "", "d/b.csv": "", "a.py": ""}, {"a.csv", "d/b.csv"}),
    "a name at the top alone": ({".gitignore": "/data\n", "data/a": "", "d/data/a": ""}, {"data/a"}),
    "a folder, not a file": ({".gitignore": "build/\n", "build/a": "", "d/build": ""}, {"build/a"}),
    "negation": ({".gitignore": "*.csv\n!keep.csv\n", "a.csv": "", "keep.csv": ""}, {"a.csv"}),
    "no negation below a folder that is out": ({".gitignore": "data/\n!data/keep\n", "data/keep": ""}, {"data/keep"}),
    "negation below a star": (
        {".gitignore": "/data/*\n!/data/keep\n", "data/keep": "", "data/drop": ""},
        {"data/drop"},
    ),
    "the deeper file counts first": (
        {".gitignore": "*.csv\n", "d/.gitignore": "!*.csv\n", "a.csv": "", "d/a.csv": "", "d/e/a.csv": ""},
        {"a.csv"},
    ),
    "a deeper file's patterns hold below it alone": (
        {"d/.gitignore": "/a\n", "a": "", "d/a": "", "d/e/a": ""},
        {"d/a"},
    ),
    "two stars": ({".gitignore": "a/**/z\n", "a/z": "", "a/b/c/z": "", "z": ""}, {"a/z", "a/b/c/z"}),
    "comments and blanks": ({".gitignore": "# a\n\n\\#b\n", "a": "", "#b": ""}, {"#b"}),
    "lines that end as on Windows": ({".gitignore": "a\r\nb\r\n", "a": "", "b": "", "c": ""}, {"a", "b"}),
    "a set of letters": ({".gitignore": "[ab].txt\n", "a.txt": "", "b.txt": "", "c.txt": ""}, {"a.txt", "b.txt"}),
    "unicode": ({".gitignore": "größe*\n", "größe.txt": "", "x": ""}, {"größe.txt"}),
    "characters that end lines elsewhere": (
        {
            ".gitignore": "a\x0cb\nc\x0bd\ne\u2028f\ng\x85h\ni\rj\n\nlast\r",
            **dict.fromkeys("abcdefghij", ""),
            "last": "",
        },
        {"last"},
    ),
    "everything but": ({".gitignore": "*\n!*.py\n!.gitignore\n", "a.py": "", "b": ""}, {"b"}),
}


def files_of(top: Path) -> set[str]:
    return set(scan(top, top.parent / "cache.json", top.parent / "workspace").files)


@pytest.mark.promise("patterns-ignore-mean-they-mean")
@pytest.mark.parametrize("name", CASES)
def test_ignore_patterns_match_like_git(tmp_path, name):
    files, left_out = CASES[name]
    top = write_tree(tmp_path / "code", files)
    assert set(files) - files_of(top) == left_out
    subprocess.run(["git", "init", "-q", top], check=True)
    listed = subprocess.run(
        ["git", "-c", "core.quotePath=off", "ls-files", "-o", "--exclude-standard"],
        cwd=top,
        capture_output=True,
        text=True,
        check=True,
    )
    assert set(listed.stdout.splitlines()) == files_of(top)


def test_reason_names_the_pattern_after_empty_lines_and_form_feeds(tmp_path):
    top = write_tree(tmp_path / "code", {".gitignore": "x\x0cy\n\n\r\n*.csv\r\n\n", "a.csv": ""})
    left_out = scan(top, tmp_path / "cache.json", tmp_path / "workspace", opened=frozenset()).not_copied
    assert [(one.path, one.why) for one in left_out] == [("a.csv", "ignored by '*.csv' in .gitignore")]


def test_amlignore_replaces_gitignore(tmp_path):
    top = write_tree(tmp_path / "code", {".amlignore": "b\n", ".gitignore": "a\n", "a": "", "b": ""})
    assert files_of(top) == {".amlignore", ".gitignore", "a"}


def test_top_amlignore_disables_gitignore_files_in_subfolders(tmp_path):
    files = {".amlignore": "b\n", "d/.gitignore": "a\n", "d/a": "", "d/.amlignore": "c\n", "d/c": ""}
    assert files_of(write_tree(tmp_path / "code", files)) == {".amlignore", "d/.gitignore", "d/a", "d/.amlignore"}


def test_without_ignore_patterns_every_file_is_included(tmp_path):
    assert files_of(write_tree(tmp_path / "code", {"a": "", ".hidden/b": ""})) == {"a", ".hidden/b"}


@pytest.mark.parametrize("name", [".git", ".paceline", "__pycache__", ".ipynb_checkpoints"])
def test_cache_folders_are_ignored_at_any_depth(tmp_path, name):
    assert files_of(write_tree(tmp_path / "code", {f"{name}/a": "", f"d/{name}/a": "", "d/a": ""})) == {"d/a"}


def test_only_the_top_level_outputs_folder_is_excluded(tmp_path):
    assert files_of(write_tree(tmp_path / "code", {"outputs/a": "", "d/outputs/a": ""})) == {"d/outputs/a"}
