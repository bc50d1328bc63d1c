from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from paceline.snapshot.git import git_state
from tests.helpers import write_program, write_tree

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(top, *words):
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    done = subprocess.run(["git", *who, *words], cwd=top, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def repository(top, files=None):
    """A repository with one commit on the branch `main`."""
    write_tree(top, files or {"train.py": "1"})
    git(top, "init", "-q", "-b", "main")
    git(top, "add", "-A")
    git(top, "commit", "-q", "-m", "first")
    return top


def test_git_state_has_commit_branch_and_dirty(tmp_path):
    top = repository(tmp_path / "code")
    assert git_state(top) == {"commit": git(top, "rev-parse", "HEAD"), "branch": "main", "dirty": False}


@pytest.mark.parametrize(
    "change",
    [
        lambda top: (top / "train.py").write_text("2"),
        lambda top: (top / "new.py").write_text(""),
        lambda top: (top / "train.py").unlink(),
        lambda top: (top / "train.py").chmod(0o755),
        lambda top: (top / "train.py").rename(top / "other.py"),
        lambda top: (write_tree(top, {"new\nname": ""}), git(top, "add", "-A")),
    ],
    ids=["edited", "untracked", "removed", "mode", "renamed", "added"],
)
def test_git_state_is_dirty_for_any_difference_from_the_commit(tmp_path, change):
    top = repository(tmp_path / "code")
    change(top)
    assert git_state(top)["dirty"] is True


def test_a_file_that_git_ignores_is_not_dirty(tmp_path):
    top = repository(tmp_path / "code", {".gitignore": "*.log\n"})
    write_tree(top, {"a.log": ""})
    assert git_state(top)["dirty"] is False


def test_changes_outside_the_source_directory_do_not_make_the_git_state_dirty(tmp_path):
    top = repository(tmp_path / "code", {"src/train.py": "", "README": ""})
    write_tree(top, {"README": "changed", "new": ""})
    state = git_state(top / "src")
    assert (state["dirty"], state["commit"]) == (False, git(top, "rev-parse", "HEAD"))


def test_a_detached_head_has_a_commit_and_no_branch(tmp_path):
    top = repository(tmp_path / "code")
    git(top, "checkout", "-q", "--detach")
    assert git_state(top) == {"commit": git(top, "rev-parse", "HEAD"), "dirty": False}


def test_git_state_of_a_repository_without_a_commit_has_only_a_branch(tmp_path):
    top = write_tree(tmp_path / "code", {"a": ""})
    git(top, "init", "-q", "-b", "main")
    assert git_state(top) == {"branch": "main", "dirty": True}


def test_branch_name_with_slashes_is_returned(tmp_path):
    top = repository(tmp_path / "code")
    git(top, "checkout", "-q", "-b", "feature/ü-1")
    assert git_state(top)["branch"] == "feature/ü-1"


def test_git_state_without_a_repository_is_empty(tmp_path):
    assert git_state(write_tree(tmp_path / "code", {"a": ""})) == {}


def test_git_state_of_a_broken_repository_is_empty(tmp_path):
    assert git_state(write_tree(tmp_path / "code", {".git/HEAD": "nonsense"})) == {}


def test_git_state_is_empty_if_the_git_command_is_not_installed(tmp_path, monkeypatch):
    top = repository(tmp_path / "code")
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert git_state(top) == {}


def test_hanging_git_times_out(tmp_path, monkeypatch):
    top = repository(tmp_path / "code")
    program = write_program(tmp_path / "bin/git", "#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("paceline.snapshot.git._TIMEOUT_S", 0.1)
    assert git_state(top) == {}


@pytest.mark.parametrize(
    ("url", "kept"),
    [
        ("https://example.org/a/b.git", "https://example.org/a/b.git"),
        ("https://user@example.org/a", "https://example.org/a"),
        ("https://user:token@example.org/a", "https://example.org/a"),
        ("https://user:t@ken@example.org/a", "https://example.org/a"),
        ("https://user:t/k n@#?en@example.org/a", "https://example.org/a"),
        ("https://:token@example.org:8080/a", "https://example.org:8080/a"),
        ("ssh://git@example.org/a", "ssh://example.org/a"),
        ("git@example.org:a/b.git", "git@example.org:a/b.git"),
        ("/srv/git/a@b", "/srv/git/a@b"),
    ],
)
def test_password_is_removed_from_the_recorded_url_of_the_git_remote(tmp_path, url, kept):
    top = repository(tmp_path / "code")
    git(top, "remote", "add", "origin", url)
    assert git_state(top)["repository_uri"] == kept
