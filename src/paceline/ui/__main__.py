"""`python -m paceline.ui CONFIG`: serve the page until a signal.

CONFIG is the JSON of a `UiConfig`. `paceline ui` starts this program.
"""

import sys


def main() -> int:
    if len(sys.argv) != 2 or not sys.argv[1].startswith("{"):
        print("usage: python -m paceline.ui '{...}'; people call `paceline ui`", file=sys.stderr)
        return 2
    from paceline.errors import PacelineError
    from paceline.ui.config import UiConfig

    try:
        config = UiConfig.from_json(sys.argv[1])
        try:
            from paceline.ui.server import serve
        except ImportError as error:
            print(
                f"paceline: error: {error.name or error} can't be imported by {sys.executable}. Install what the page needs: "
                "pip install 'paceline[ui]'.",
                file=sys.stderr,
            )
            return 1
        return serve(config)
    except PacelineError as error:
        print(f"paceline: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
