"""The collectives that a rank is in, in a file of memory: written at next to no cost, read by others without the rank's help.

    <folder>/board_<rank>       slots of one size; a collective under way has one until it is over

Whoever reads gets the bytes as they lie there, also of a process that is stopped, or whose interpreter is held by native code.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Iterable
from typing import NamedTuple

#: Names the folder of the boards, and of what else a node keeps of its workers for whoever asks why they wait.
FOLDER_VARIABLE = "PACELINE_WATCH_DIR"

#: Whether it is under way, the length of its text, its number, when it began (seconds since the epoch), the text.
_SLOT = struct.Struct("<BxHxxxxQd232s")
_TEXT_BYTES = 232
#: More collectives than these at once are not noted.
_SLOTS = 256


class BoardEntry(NamedTuple):
    """A collective that a rank has begun and that is not over.

    channel: the group in which it is one of many, the same on all its ranks. number: its place in the channel, from 1 on, where
    all ranks begin them in one order; 0 where ranks may begin them in any order, and the name tells them apart.
    shape: such as "[4, 3] float32". ranks: the group's, "0-3" or "0,2"; empty for all. began: seconds since the epoch.
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
    """One rank's board, for the process that writes it."""

    def __init__(self, path: str) -> None:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, _SLOTS * _SLOT.size)
            self._memory = mmap.mmap(file, _SLOTS * _SLOT.size)
        finally:
            os.close(file)
        # append and pop of a list need no lock.
        self._free = [slot * _SLOT.size for slot in reversed(range(_SLOTS))]

    def begin(self, text: str, number: int) -> int:
        """Note that a collective begins, and where that is noted, for `end`. text: what `entry_text` has made."""
        try:
            place = self._free.pop()
        except IndexError:
            return -1
        data = text.encode("utf-8", "replace")[:_TEXT_BYTES]
        _SLOT.pack_into(self._memory, place, 1, len(data), number, time.time(), data)
        return place

    def end(self, place: int) -> None:
        """Note that it is over."""
        if place >= 0:
            self._memory[place] = 0
            self._free.append(place)


def entry_text(channel: str, kind: str, name: str, shape: str, size: int, ranks: str) -> str:
    """What `RankBoard.begin` is to be given; worth keeping for a collective that comes again."""
    # The name is cut first: it alone may be long.
    room = _TEXT_BYTES - len(channel) - len(kind) - len(shape) - len(ranks) - 20
    return "\t".join((channel, kind, name[: max(room, 20)], shape, str(size), ranks))


def read(path: str) -> list[BoardEntry]:
    """What is under way by a board, the oldest first; nothing where there is no board."""
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
        # One that is being written at this moment.
        if len(words) != 6 or not words[4].isdigit():
            continue
        channel, kind, name, shape, size, ranks = words
        found.append(BoardEntry(channel, kind, name, number, shape, int(size), ranks, began))
    return sorted(found, key=lambda entry: entry.began)


def ranks_text(ranks: Iterable[int]) -> str:
    """Ranks as text: "0-3" for 0 to 3, "0,2-4" for 0, 2, 3 and 4."""
    parts: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ",".join("-".join(map(str, part)) for part in parts)


def ranks_of(text: str) -> list[int]:
    """The ranks that `ranks_text` has written."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            found += range(int(first), int(last if last.isdigit() else first) + 1)
    return found
