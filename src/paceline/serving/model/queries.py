"""The query of a GET as values."""

from __future__ import annotations

import json
import urllib.parse
from typing import Any

from paceline.serving.wire import ModelCall


def values_of(call: ModelCall) -> dict[str, Any]:
    """The query's parameters, each as JSON where it is some; those that come again as a list."""
    values: dict[str, list[Any]] = {}
    for name, text in urllib.parse.parse_qsl(call.head.get("query", ""), keep_blank_values=True):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        values.setdefault(name, []).append(value)
    return {name: found[0] if len(found) == 1 else found for name, found in values.items()}
