from __future__ import annotations

import fcntl
import os
import tempfile

from paceline.compat.horovod.runner import rank


def test_unlocked_temporary_folders_of_killed_ranks_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("horovodrun-rank-0-dead", "horovodrun-rank-1-lives", "horovodrun-rank-2-new", "mine"):
        (tmp_path / name).mkdir()
        if not name.endswith("new"):
            (tmp_path / name / "lock").touch()
    with open(tmp_path / "horovodrun-rank-1-lives" / "lock") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        rank._remove_left()
    assert sorted(os.listdir(tmp_path)) == ["horovodrun-rank-1-lives", "horovodrun-rank-2-new", "mine"]
