"""One file that a transfer is asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.data.transfer.partial import Partial


@dataclass(frozen=True, kw_only=True)
class FileToFetch:
    """A file to fetch. path, size, version: in the store. part: where it grows. place: gives the whole file its name.

    is_there: whether somebody else has finished it; asked once its lock is had.
    """

    path: str
    size: int
    version: str
    part: Path
    place: Callable[[Partial], None]
    is_there: Callable[[], bool]
