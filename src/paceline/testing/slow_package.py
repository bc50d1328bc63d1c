"""A Python package whose build takes a minute without network, to observe a run in preparation."""

from __future__ import annotations

from pathlib import Path

_PROJECT = """\
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "slow-package"
version = "1.0"
"""

_BACKEND = """\
import time


def get_requires_for_build_wheel(config_settings=None):
    time.sleep(60)
    return []


def build_wheel(directory, config_settings=None, metadata_directory=None):
    raise RuntimeError("nobody has ended this build")
"""


def write_slow_package(folder: Path) -> Path:
    """Write the package's source into `folder`. Return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(_PROJECT)
    (folder / "backend.py").write_text(_BACKEND)
    return folder
