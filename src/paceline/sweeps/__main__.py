"""`python -m paceline.sweeps RUN_DIR [FD]`: see one sweep through (`paceline.children.engine`)."""

from __future__ import annotations

import sys

from paceline.children import engine
from paceline.runs.folder import RunFolder
from paceline.sweeps import controller, start
from paceline.sweeps.controller import Controller
from paceline.sweeps.results import MORE


def main(argv: list[str]) -> int:
    return engine.see_through(argv, Controller, controller.give_up, _more_is_asked)


def _more_is_asked(folder: RunFolder) -> bool:
    if not (folder.path / MORE).exists():
        return False
    start.count_anew(folder)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
