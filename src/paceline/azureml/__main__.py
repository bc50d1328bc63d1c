"""`python -m paceline.azureml driver.py [argument ...]`: run a driver for the Azure ML SDK v1 as it is."""

from __future__ import annotations

import os
import runpy
import sys


def main() -> None:
    """Run the program that the command line names, with its arguments, as `python` itself would."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__, file=sys.stderr)
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    script = sys.argv[1]
    if not os.path.isfile(script):
        print(f"paceline: error: there is no program {script!r}. Give the path of a Python file.", file=sys.stderr)
        raise SystemExit(2)
    del sys.argv[0]
    # The program's own folder in the place of the working directory, which `-m` has put first.
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
