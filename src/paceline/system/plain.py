"""Frozen data as plain JSON values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any


def plain_fields(record: Any) -> dict[str, Any]:
    """Field -> its value as JSON has it, of a dataclass: by its own `to_json`, where it has one; a path as text."""
    return {field.name: _plain(getattr(record, field.name)) for field in fields(record)}


def _plain(value: Any) -> Any:
    if hasattr(value, "to_json"):
        return value.to_json()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value
