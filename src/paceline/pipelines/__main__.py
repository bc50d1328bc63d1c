"""`python -m paceline.pipelines RUN_DIR FD`: see one pipeline through (`paceline.controlling.process`)."""

from __future__ import annotations

import sys

from paceline.controlling import process
from paceline.pipelines import ending
from paceline.pipelines.controller import PipelineController


def main(argv: list[str]) -> int:
    return process.see_through(argv, PipelineController, ending.give_up)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
