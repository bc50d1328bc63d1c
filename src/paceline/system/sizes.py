"""Sizes as people write them: 500MB, 2 GB, 1GiB."""

from __future__ import annotations

import re

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("", 1000), ("B", 1000), ("I", 1024), ("IB", 1024))
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", re.ASCII)


def size_bytes(given: str) -> int:
    """Bytes of "500MB", "1.5 GB" (powers of 1,000), "1GiB" (of 1,024) or a plain number.

    Raises:
        ValueError: it is none of these; the message says what is.
    """
    found = _SIZE.fullmatch(given)
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise ValueError(f"{given!r} is no size. Write it as 500MB, 2GB or 1GiB.")
    return int(float(found[1]) * unit)


def size_text(size: float) -> str:
    """Bytes as people say them: "3.2 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
