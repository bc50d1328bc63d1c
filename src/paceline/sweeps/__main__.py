"""`python -m paceline.sweeps RUN_DIR [FD]`: see one sweep through (`paceline.controlling.process`)."""

from __future__ import annotations

import sys

from paceline.controlling import process
from paceline.runs.folder import RunFolder
from paceline.sweeps import ending, start
from paceline.sweeps.controller import Controller
from paceline.sweeps.results import MORE


def main(argv: list[str]) -> int:
    return process.see_through(argv, Controller, ending.give_up, _more_is_asked)


def _more_is_asked(folder: RunFolder) -> bool:
    if not (folder.path / MORE).exists():
        return False
    start.count_anew(folder)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
