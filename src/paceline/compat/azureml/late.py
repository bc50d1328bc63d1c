"""What stands above a module that needs it all the same, by its name: a run gives its model, and a model its run."""

from __future__ import annotations

import importlib
from typing import Any


def late(module: str, name: str) -> Any:
    """A name of a module of this package (`core.model`), loaded now."""
    return getattr(importlib.import_module(f"paceline.compat.azureml.{module}"), name)
