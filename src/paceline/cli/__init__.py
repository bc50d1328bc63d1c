"""The command line: one file for each group of verbs. Nothing imports it."""

from __future__ import annotations

from paceline.cli.main import main

__all__ = ["main"]
