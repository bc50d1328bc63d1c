"""The verbs (subcommands) of the command line: a file for each group of verbs."""

from __future__ import annotations

from paceline.cli.main import main

__all__ = ["main"]
