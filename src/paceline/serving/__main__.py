"""`python -m paceline.serving CONFIG.json`: a server, until a signal ends it."""

import sys
from pathlib import Path


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print("usage: python -m paceline.serving CONFIG.json", file=sys.stderr)
        return 2
    from paceline.serving.front.start import run

    return run(Path(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
