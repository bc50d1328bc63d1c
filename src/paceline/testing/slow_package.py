"""A package that takes a minute to build and needs no network for it, so that a run can be met while it prepares."""

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
    """`folder`, with such a package in it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(_PROJECT)
    (folder / "backend.py").write_text(_BACKEND)
    return folder
