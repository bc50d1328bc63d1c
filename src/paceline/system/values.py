"""Values of metrics and hyperparameters as tables have them."""

from __future__ import annotations

import json
from typing import Any


def value_text(value: Any) -> str:
    """Six digits of a number, a dash for none, lists and mappings as JSON."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value) if isinstance(value, (list, tuple, dict)) else str(value)
