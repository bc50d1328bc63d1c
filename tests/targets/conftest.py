from __future__ import annotations

import shutil

import pytest

from tests.engines.conftest import require_engine


@pytest.fixture
def ssh_client() -> None:
    """OpenSSH's, without which no host is reached."""
    require_engine("ssh", shutil.which("ssh"))
