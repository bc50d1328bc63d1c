"""The git state of a source directory: tracked files, commit, branch and dirty flag."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from paceline.job.secret_values import hidden

_TIMEOUT_S = 5.0


def git_state(source: Path) -> dict[str, object]:
    """Return commit, branch, dirty and repository_uri of the repository of `source`.

    dirty: Whether any file below `source` differs from the commit or is untracked.
    branch: Missing if the head is detached.
    repository_uri: The URL of the remote "origin" without a password; missing without this remote.

    The result is {} without a repository, without git, or if git takes more than 5 seconds.
    """
    # Look for `.git` first, because starting git only to find no repository takes longer. In a worktree `.git` is a file.
    if not any((folder / ".git").exists() for folder in (source, *source.resolve().parents)):
        return {}
    # Get the branch and the status in one call of git, because starting a process takes most of the time.
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
                state["dirty"] = True  # in git's output, each line without "#" is a changed file
    if uri:
        state["repository_uri"] = re.sub(r"(?<=://)[^/]*@", "", hidden(uri))
    return state


def tracked_files(source: Path) -> list[str]:
    """Return the paths of files below `source` that git tracks."""
    text = _output(_git(source, "ls-files", "-z", "--cached"))
    return [name for name in (text or "").split("\0") if name]


def _git(source: Path, *arguments: str) -> subprocess.Popen[str] | None:
    # `git status` would lock the index to refresh it, and so block the user's own git.
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
        # `git status` may take minutes on a network disk, so kill it. The second call of `communicate` reaps the process.
        process.kill()
        process.communicate()
        return None
    return text if process.returncode == 0 else None
