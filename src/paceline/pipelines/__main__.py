"""`python -m paceline.pipelines RUN_DIR FD`: see one pipeline through (`paceline.children.engine`)."""

from __future__ import annotations

import sys

from paceline.children import engine
from paceline.pipelines import controller
from paceline.pipelines.controller import PipelineController


def main(argv: list[str]) -> int:
    return engine.see_through(argv, PipelineController, controller.give_up)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
