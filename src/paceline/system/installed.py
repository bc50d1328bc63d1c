"""What is installed beside Paceline, without importing it."""

from __future__ import annotations

from importlib import metadata


def version_of(distribution: str) -> str | None:
    """The version of what is installed under this name; None where nothing is."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
