"""`python -m paceline.serving CONFIG.json`: run a server until a signal ends it."""

import sys
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    if len(argv) != 1 or argv[0].startswith("-"):
        print("usage: python -m paceline.serving CONFIG.json", file=sys.stderr)
        return 2
    from paceline.serving.front.start import run

    return run(Path(argv[0]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
