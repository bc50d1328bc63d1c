"""The doctor's findings: one line for each thing looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

OK, WARN, FAIL, SKIPPED = "ok", "warn", "fail", "skipped"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check of one node, or of all of them.

    level: "ok"; "warn": runs may work; "fail": runs will not; "skipped": could not be looked at, because of another finding or
    because there is nothing to look at.
    node: None for what concerns the target or all nodes. seen: what was found, with the values. advice: what to do about it.
    """

    check: str
    level: str
    seen: str
    node: str | None = None
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def worst(findings: Iterable[Finding]) -> str:
    """The worst level of all findings: "fail", "warn" or "ok"."""
    levels = {finding.level for finding in findings}
    return next((level for level in (FAIL, WARN) if level in levels), OK)


def size_text(size: float) -> str:
    """A size in bytes as people say it: "1.5 GB"."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size / 1e3:.0f} kB"
