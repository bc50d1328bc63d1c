"""What is new in a run's folder as parts that follow each other, for a store that takes whole objects only.

A part is frames (`paceline.remote.wire`): those of `paceline.remote.replica.changes`, and at last {"over": true}, after which
nothing follows any more. What has been stored is never stored again: a log goes by what has come to it.

The record is in no part before all that was new when it was read; the run's end is in the last but one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.remote.replica.apply import Replica, ReplicaError
from paceline.remote.replica.changes import LARGE, RECORD, WORK, Changes, Frame, small_names
from paceline.remote.wire import Frames, frame
from paceline.runs import states


class DeltaRecorder:
    """Records a run's folder `top`, part by part. part_bytes: about how large a part may grow."""

    def __init__(self, top: Path, part_bytes: int = 16 << 20) -> None:
        self._top, self._part_bytes = os.fspath(top), part_bytes
        self._changes = Changes(self._top, {})
        #: A pass over the user's files, which may take many parts; whether it was begun when nothing changed any more.
        self._pass: Iterator[Frame | None] | None = None
        self._pass_is_final = False

    def skip_present(self) -> None:
        """Take what is there now, but for the user's files, for known on the other side."""
        self._changes.skip([*small_names(self._top), RECORD])

    def part(self, *, is_final: bool = False) -> bytes | None:
        """What has changed since the last part, or a piece of it; None where nothing has.

        is_final: nothing changes any more. Then None comes once all has been recorded, the run's end last of all.
        """
        record = self._record()  # read first, so that nothing comes after it that it knows of
        pieces = [frame(*found) for found in self._changes.small(small_names(self._top))]
        is_through = self._take_large(pieces, is_final)
        if record is not None:
            header, data, is_end = record
            if not is_end or (is_final and is_through):
                self._changes.known[RECORD] = header["stamp"]
                pieces.append(frame(header, data))
        return b"".join(pieces) or None

    def _record(self) -> tuple[dict[str, Any], bytes, bool] | None:
        try:
            record = self._changes.record(states.TERMINAL)
        except FileNotFoundError:
            return None
        return None if record[0]["stamp"] == self._changes.known.get(RECORD) else record

    def _take_large(self, pieces: list[bytes], is_final: bool) -> bool:
        """Go on with the pass over the user's files until the part is large enough; whether a final pass is through."""
        size = sum(map(len, pieces))
        while True:
            if self._pass is None:
                # Nothing of the run stays there: what a script has left in its working directory comes as well.
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
    """The part after which nothing follows."""
    return frame({"over": True})


def ends(part: bytes) -> bool:
    """Whether it is a part after which nothing follows.

    Raises:
        ValueError: it is no part.
    """
    return any(header.get("over") for header, _ in Frames().feed(part))


def replay(part: bytes, replica: Replica) -> bool:
    """Do to a run's folder what a part says; whether it was the last.

    Raises:
        ValueError: the part is no part, or says what may not be done.
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
