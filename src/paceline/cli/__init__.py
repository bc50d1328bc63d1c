"""Verbs of the command line, one file for each group of verbs."""

from __future__ import annotations

from paceline.cli.main import main

__all__ = ["main"]
