"""Control one sweep: `python -m paceline.sweeps RUN_DIR [FD]`. FD is the descriptor of the run's lock."""

from __future__ import annotations

import sys

from paceline.children import engine
from paceline.sweeps.controller import Controller


def main(argv: list[str]) -> int:
    return engine.main(argv, Controller)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
