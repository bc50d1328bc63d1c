"""Headers of a request or an answer: a mapping that looks names up in any case, and keeps how they were written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping


class Headers(MutableMapping[str, str]):
    """Names given twice are joined by a comma (RFC 9110, 5.3)."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._found: dict[str, tuple[str, str]] = {}
        for name, value in pairs:
            before = self._found.get(name.lower())
            self._found[name.lower()] = (name, f"{before[1]}, {value}" if before else value)

    def __getitem__(self, name: str) -> str:
        return self._found[name.lower()][1]

    def __setitem__(self, name: str, value: str) -> None:
        # Header injection: a line feed would begin another header.
        if any(character in "\r\n\0" for character in name + value):
            raise ValueError(f"header {name!r}: a name or a value with a line feed can't be sent")
        self._found[name.lower()] = (name, value)

    def __delitem__(self, name: str) -> None:
        del self._found[name.lower()]

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._found.values())

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return f"Headers({list(self.items())})"
