"""Tells what torch's flight recorder knows of this process's collectives, Gloo's and NCCL's, to whoever asks.

A thread waits at a named pipe, <folder>/ask_<rank>; a line there names the file that is to hold the answer, JSON. It needs the
interpreter, which torch's own calls let go while they wait. The thread is there from the first `init_process_group` on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import contextmanager

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType
    from typing import Any

    from paceline.system.collective_state import RankBoard


_MODULE = "torch.distributed.distributed_c10d"

_board: RankBoard | None = None
_is_made = False


def answer_recorder_requests(path: str) -> None:
    """Answer at this named pipe as soon as the script makes a process group of torch's; loads nothing before."""
    from paceline.system.lazy_import import when_loaded

    when_loaded(_MODULE, lambda module: _follow(module, path))


def _follow(module: ModuleType, path: str) -> None:
    """Let what makes process groups start the thread, and be on the board while it waits for other ranks."""
    import functools
    import itertools

    from paceline.collectives import step_hooks

    step_hooks.follow_collectives()

    def put_on_board(name: str, group: str, numbers: Iterator[int]) -> None:
        made = getattr(module, name)

        @functools.wraps(made)
        def call(*given: Any, **options: Any) -> Any:
            from paceline.system.collective_state import entry_text

            _start(path)
            with under_way(entry_text(group, name, "", "", 0, ""), next(numbers)):
                return made(*given, **options)

        setattr(module, name, call)

    put_on_board("init_process_group", "torch", itertools.repeat(0))
    # Each rank of the world has to call it, also one that will not be in the group.
    put_on_board("new_group", "torch's groups", itertools.count(1))


_pipe: int | None = None


def _start(path: str) -> None:
    global _pipe
    if _pipe is not None:
        return
    try:
        os.mkfifo(path, 0o600)
    except FileExistsError:
        pass
    except OSError:
        return
    import threading

    # For reading and writing: so it never ends, whoever comes and goes at the other end.
    _pipe = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    threading.Thread(target=_serve, args=(_pipe, os.path.dirname(path)), name="paceline-recorder", daemon=True).start()


def _serve(pipe: int, folder: str) -> None:
    while True:
        for name in os.read(pipe, 4096).decode("utf-8", "replace").split():
            try:
                _tell(os.path.join(folder, os.path.basename(name)))
            except Exception:  # a release of torch that tells otherwise: who has asked goes on without
                continue


def _tell(path: str) -> None:
    from paceline.torch_private import recorded_collectives

    data = recorded_collectives()
    beside = f"{path}.new"
    with open(beside, "wb") as file:
        file.write(data)
    os.replace(beside, path)


def _close_pipe() -> None:
    # A forked child has not the thread; it must not take what is meant for its parent.
    global _pipe
    if _pipe is not None:
        os.close(_pipe)
        _pipe = None


os.register_at_fork(after_in_child=_close_pipe)


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
