"""Record the changes of a run's folder as parts in a store, and replay them.

A part is a list of frames (`paceline.remote.wire`) with the changes of `paceline.remote.replica.changes`. The last part is
{"over": true}. No data are stored twice. For example, each part has only the new bytes of a growing log.

The run's record (its status) is stored after all earlier changes. The part before the last one has the final record.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from paceline.remote.replica.apply import Replica, ReplicaError
from paceline.remote.replica.changes import LARGE, RECORD, WORK, Changes, small_names
from paceline.remote.wire import Frame, Frames, Header, frame
from paceline.runs import states


class DeltaRecorder:
    """A recorder of changes in the run's folder `top`, in parts to store.

    part_bytes: The approximate size limit of a part.
    """

    def __init__(self, top: Path, part_bytes: int = 16 << 20) -> None:
        self._top, self._part_bytes = os.fspath(top), part_bytes
        self._changes = Changes(self._top, {})
        #: An unfinished pass over all user files, or None. `_pass_is_final`: whether it began after the last change.
        self._pass: Iterator[Frame | None] | None = None
        self._pass_is_final = False

    def skip_present(self) -> None:
        """Treat the files that exist now as recorded, except the run's outputs."""
        self._changes.skip([*small_names(self._top), RECORD])

    def part(self, *, is_final: bool = False) -> bytes | None:
        """Return the changes since the last call as a part, or None.

        is_final: Whether the files no longer change. Then None means that all changes are recorded.
        """
        record = self._record()  # read the record first, so that it is never newer than the changes
        pieces = [frame(*found) for found in self._changes.small(small_names(self._top))]
        is_through = self._take_large(pieces, is_final)
        if record is not None:
            header, data, is_end = record
            if not is_end or (is_final and is_through):
                self._changes.known[RECORD] = header["stamp"]
                pieces.append(frame(header, data))
        return b"".join(pieces) or None

    def _record(self) -> tuple[Header, bytes, bool] | None:
        try:
            record = self._changes.record(states.TERMINAL)
        except FileNotFoundError:
            return None
        return None if record[0]["stamp"] == self._changes.known.get(RECORD) else record

    def _take_large(self, pieces: list[bytes], is_final: bool) -> bool:
        """Append changes of the run's outputs to `pieces`. Return whether all fit."""
        size = sum(map(len, pieces))
        while True:
            if self._pass is None:
                # At the run's end record the script's working directory too, since the run's folder is removed afterwards.
                folders = (*LARGE, WORK) if is_final else LARGE
                self._pass, self._pass_is_final = self._changes.large(is_final, folders), is_final
            for found in self._pass:
                if found is not None:
                    pieces.append(frame(*found))
                    size += len(pieces[-1])
                if size >= self._part_bytes:
                    return False
            self._pass = None
            if not is_final or self._pass_is_final:
                return True


def end_part() -> bytes:
    """Return the part that ends a sequence of recorded changes, {"over": true}."""
    return frame({"over": True})


def ends(part: bytes) -> bool:
    """Return whether a part ends its sequence of changes. Raise ValueError for an invalid part."""
    return any(header.get("over") for header, _ in Frames().feed(part))


def replay(part: bytes, replica: Replica) -> bool:
    """Apply a part's changes to a run's folder. Return whether it is the last.

    Raises:
        ValueError: The part is invalid, or has a forbidden change.
    """
    frames, is_over = Frames(), False
    for header, data in frames.feed(part):
        if header.get("over"):
            is_over = True
        else:
            replica.apply(header, data)
    if frames.is_torn:
        raise ReplicaError("the part is cut short")
    return is_over
