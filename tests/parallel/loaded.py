"""What the worlds of ranks run: loaded once, by the program that each of their processes is forked from.

A model of transformers is made of each family, for its classes are loaded when they are first asked for.
"""

from __future__ import annotations

import contextlib
import importlib

from tests.parallel.world import lacking, modules

for _module in modules():
    if lacking(_module) is None:
        importlib.import_module(f"tests.parallel.checks.{_module}")
if lacking("families") is None:
    from tests.parallel.checks.families import SHORT
    from tests.parallel.kinds.families import FAMILIES

    # Sort the models: names that a library registers at import are part of the state that a forward reads and that ranks
    # compare.
    for _name in sorted(set().union(*SHORT.values())):
        # Ignore the error of a model that can't be made, because the check of this model reports it.
        with contextlib.suppress(Exception):
            FAMILIES[_name].make()
