from __future__ import annotations

import pytest

from paceline.compat.azureml.core.workspace import Workspace


@pytest.fixture
def ws(tmp_path, monkeypatch):
    """A workspace of the SDK's, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_WORKSPACE", raising=False)
    monkeypatch.delenv("PACELINE_AZUREML", raising=False)
    return Workspace.from_config()
