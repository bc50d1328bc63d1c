"""The git repository of a source directory: its files, and the commit, branch and dirty flag."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from paceline.job.secret_values import hidden

_TIMEOUT_S = 5.0


def git_state(source: Path) -> dict[str, object]:
    """commit, branch, dirty and repository_uri of the repository that holds `source`; empty where none does.

    dirty: whether anything below `source`, untracked files included, differs from the commit. A branch is absent on a
    detached head, repository_uri where there is no remote "origin"; passwords are cut out of it. Where git is not
    installed or takes over 5 seconds, nothing is recorded.
    """
    # A look at the folders costs less than a process that finds no repository. In a worktree `.git` is a file.
    if not any((folder / ".git").exists() for folder in (source, *source.resolve().parents)):
        return {}
    # Both at once: each costs little but a process.
    status = _git(source, "status", "--porcelain=v2", "--branch", "--untracked-files=normal", "--", ".")
    remote = _git(source, "config", "--get", "remote.origin.url")
    text = _output(status)
    uri = (_output(remote) or "").strip()
    if text is None:
        return {}
    state: dict[str, object] = {"dirty": False}
    for line in text.splitlines():
        match line.split(" "):
            case ["#", "branch.oid", commit] if commit != "(initial)":
                state["commit"] = commit
            case ["#", "branch.head", *words] if words != ["(detached)"]:
                state["branch"] = " ".join(words)
            case ["#", *_]:
                pass
            case _:
                # Every line without "#" is a file that differs.
                state["dirty"] = True
    if uri:
        state["repository_uri"] = re.sub(r"(?<=://)[^/]*@", "", hidden(uri))
    return state


def tracked_files(source: Path) -> list[str]:
    """Return the files below `source` that git tracks, relative to it; none where git is not installed or too slow."""
    text = _output(_git(source, "ls-files", "-z", "--cached"))
    return [name for name in (text or "").split("\0") if name]


def _git(source: Path, *arguments: str) -> subprocess.Popen[str] | None:
    # `git status` refreshes the index, and takes its lock for that; the user's own git would find it locked.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        return subprocess.Popen(
            ["git", "-C", str(source), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            env=environment,
        )
    except OSError:
        return None


def _output(process: subprocess.Popen[str] | None) -> str | None:
    if process is None:
        return None
    try:
        text, _ = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        # On a network disk a status may take minutes; the second call takes the killed process off the system.
        process.kill()
        process.communicate()
        return None
    return text if process.returncode == 0 else None
