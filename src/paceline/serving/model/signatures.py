"""The parameters of a function of a scoring script."""

from __future__ import annotations

import inspect
from typing import Any

from paceline.errors import ServingError


def parameters(function: Any, path: str) -> list[inspect.Parameter]:
    """The parameters, each of which can be given by its name.

    Raises:
        ServingError: one can't.
    """
    found = list(inspect.signature(function).parameters.values())
    for each in found:
        if each.kind not in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD):
            raise ServingError(
                f"{path}: {getattr(function, '__name__', 'run')}() takes {each}, which can't be given by a name. Write plain "
                "parameters, without *, ** and /."
            )
    return found
