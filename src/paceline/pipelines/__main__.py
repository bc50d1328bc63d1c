"""Control one pipeline: `python -m paceline.pipelines RUN_DIR FD`. FD is the descriptor of the run's lock."""

from __future__ import annotations

import sys

from paceline.children import engine
from paceline.pipelines.controller import PipelineController


def main(argv: list[str]) -> int:
    return engine.main(argv, PipelineController)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
