"""Record a rank's running collectives in a memory-mapped file for other processes.

    <folder>/board_<rank>       slots of equal size; a collective occupies a slot until it has ended

Writing takes almost no time. The rank need not do anything for a reader. So another process can read the file even if
the rank is stopped or its native code blocks the interpreter.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterable
from typing import NamedTuple

#: Variable with the folder of a node's diagnostic files, such as the file with the state of its collectives.
FOLDER_VARIABLE = "PACELINE_WATCH_DIR"

#: Layout of a slot, which records a collective: 1 while it runs, the text's length, number, start (Unix time), text.
_SLOT = struct.Struct("<BxHxxxxQd232s")
_TEXT_BYTES = 232
#: Number of slots; if more collectives are open at the same time, the further collectives are not recorded.
_SLOTS = 256


class BoardEntry(NamedTuple):
    """A collective that a rank has begun and not yet finished.

    Attributes:
        channel: Name of a sequence of collectives that all ranks of a group begin in the same order.
        number: The collective's position in the channel, from 1. It is 0 if ranks may begin collectives in any order;
            then the name identifies the collective.
        shape: Shape and type of the tensor, such as "[4, 3] float32".
        ranks: Ranks of the group, such as "0-3" or "0,2"; empty for all.
        began: Start time in seconds since 1970.
    """

    channel: str
    kind: str
    name: str
    number: int
    shape: str
    bytes: int
    ranks: str
    began: float


class RankBoard:
    """The writer of one rank's file of running collectives."""

    def __init__(self, path: str) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, _SLOTS * _SLOT.size)
            self._memory = mmap.mmap(file, _SLOTS * _SLOT.size)
        finally:
            os.close(file)
        # append and pop of a list are atomic, so they need no lock.
        self._free = [slot * _SLOT.size for slot in reversed(range(_SLOTS))]

    def begin(self, text: str, number: int) -> int:
        """Record a collective's start. Return its slot in the file; -1 if full.

        text: The result of `entry_text`. number: The collective's position in its channel; 0 without a fixed order.
        """
        try:
            place = self._free.pop()
        except IndexError:
            return -1
        data = text.encode("utf-8", "replace")[:_TEXT_BYTES]
        _SLOT.pack_into(self._memory, place, 1, len(data), number, time.time(), data)
        return place

    def end(self, place: int) -> None:
        """Free the slot that `begin` returned for a finished collective."""
        if place >= 0:
            self._memory[place] = 0
            self._free.append(place)


def entry_text(channel: str, kind: str, name: str, shape: str, size: int, ranks: str) -> str:
    """Join facts about a collective to a text for `RankBoard.begin`. ranks: such as "0-3"."""
    # Shorten the name first: only the name can be long.
    room = _TEXT_BYTES - len(channel) - len(kind) - len(shape) - len(ranks) - 20
    return "\t".join((channel, kind, name[: max(room, 20)], shape, str(size), ranks))


def read(path: str) -> list[BoardEntry]:
    """Return a rank's running collectives, oldest first; [] without a file."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError:
        return []
    found = []
    for place in range(0, len(data) - _SLOT.size + 1, _SLOT.size):
        if not data[place]:
            continue
        _, length, number, began, text = _SLOT.unpack_from(data, place)
        words = text[:length].decode("utf-8", "replace").split("\t")
        # The rank is writing this slot at the moment, so skip it.
        if len(words) != 6 or not words[4].isdecimal():
            continue
        channel, kind, name, shape, size, ranks = words
        found.append(BoardEntry(channel, kind, name, number, shape, int(size), ranks, began))
    return sorted(found, key=lambda entry: entry.began)


def ranks_text(ranks: Iterable[int]) -> str:
    """Format ranks: "0-3" for 0 to 3, "0,2-4" for 0, 2, 3 and 4."""
    parts: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ",".join("-".join(map(str, part)) for part in parts)


def ranks_of(text: str) -> list[int]:
    """Return the ranks of a text such as "0-3,7", as `ranks_text` writes it."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            found += range(int(first), int(last if last.isdecimal() else first) + 1)
    return found
