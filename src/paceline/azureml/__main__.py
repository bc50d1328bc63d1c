"""Run an unchanged driver for the Azure ML SDK v1.

Usage: python -m paceline.azureml driver.py [argument ...]
   or: python -m paceline.azureml -m package.driver [argument ...]
"""

from __future__ import annotations

import os
import runpy
import sys

from paceline.compat.alias_finder import spec_of


def main() -> None:
    """Run the program on the command line, as `python` would."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__, file=sys.stderr)
        raise SystemExit(0 if len(sys.argv) > 1 else 2)
    if sys.argv[1] == "-m":
        _run_module()
        return
    script = sys.argv[1]
    if not os.path.isfile(script):
        print(f"paceline: error: there is no program {script!r}. Give the path of a Python file.", file=sys.stderr)
        raise SystemExit(2)
    del sys.argv[0]
    # `python -m` has put the working directory first in sys.path. Put the program's own folder there instead.
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    # Pass an absolute path, because the program may compute other paths from `__file__`.
    runpy.run_path(os.path.abspath(script), run_name="__main__")


def _run_module() -> None:
    if len(sys.argv) < 3:
        print(
            "paceline: error: -m without a module. Write: python -m paceline.azureml -m package.module", file=sys.stderr
        )
        raise SystemExit(2)
    module = sys.argv[2]
    del sys.argv[:2]
    # Replace the first entry of sys.path by the working directory, as `python -m` does.
    sys.path[0] = os.getcwd()
    if spec_of(module) is None:
        print(f"paceline: error: there is no module {module!r}. Name one that `python -m` finds here.", file=sys.stderr)
        raise SystemExit(2)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
