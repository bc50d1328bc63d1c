"""Runs as readers see them, and what they ask of whoever looks after a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paceline.errors import RunStateError
from paceline.runs import read, remote_status, removal, states
from tests.helpers import make_run


def test_cancel_of_another_users_run_is_refused_with_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, fd = make_run(tmp_path, submitted_by="ann")
    os.close(fd)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    # Root, who runs some tests, may write to every folder.
    monkeypatch.setattr(read, "write_json", refuse)
    with pytest.raises(RunStateError, match=r"belongs to ann, .* Permission denied\. Ask them to cancel it"):
        read.request_cancel(folder, "bob")


def test_removal_and_write_off_of_another_users_run_are_refused_with_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They named a process that looks after the run, and said to try again.
    folder, fd = make_run(tmp_path, status=states.CANCELED, submitted_by="ann")
    os.close(fd)
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # root may write to every folder
    with pytest.raises(RunStateError, match=r"belongs to ann, .* Ask them to remove it"):
        removal.remove(folder)
    with pytest.raises(RunStateError, match=r"belongs to ann, .* Ask them to cancel it"):
        remote_status.write_off(folder, "bob")
