"""This process's board (`paceline.system.collective_state`), where whoever has started it keeps one; else nothing is noted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import contextmanager

# Not typing's: a worker loads this before its script.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.system.collective_state import RankBoard

_board: RankBoard | None = None
_is_made = False


def board(environ: Mapping[str, str] = os.environ) -> RankBoard | None:
    """The board; made at the first call. None where none is to be kept, as in a process that a worker has forked."""
    global _board, _is_made
    if not _is_made:
        _is_made = True
        from paceline.system.collective_state import FOLDER_VARIABLE, RankBoard
        from paceline.system.run_variables import nested_rank

        folder, rank = environ.get(FOLDER_VARIABLE), environ.get("PACELINE_RANK")
        if folder and rank and nested_rank(environ) is None:
            try:
                _board = RankBoard(os.path.join(folder, f"board_{rank}"))
            except (OSError, ValueError):  # no room, or no such folder: a run goes on without
                _board = None
    return _board


def begin(text: str, number: int = 0) -> int:
    """Note that a collective begins. Return the slot of the note, for `end`.

    text: made by `paceline.system.collective_state.entry_text`.
    """
    found = _board if _is_made else board()
    return -1 if found is None else found.begin(text, number)


def end(place: int) -> None:
    """Note that it is over."""
    if _board is not None:
        _board.end(place)


@contextmanager
def under_way(text: str, number: int = 0) -> Iterator[None]:
    """A block that is a collective."""
    place = begin(text, number)
    try:
        yield
    finally:
        end(place)


def _forget() -> None:
    # A data loader's worker shares the memory, and is in no collective.
    global _board, _is_made
    _board, _is_made = None, True


os.register_at_fork(after_in_child=_forget)
