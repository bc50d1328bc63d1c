"""Records of this process's running collectives, and JSON of torch's flight recorder for Gloo and NCCL on request.

A thread reads the named pipe <folder>/ask_<rank>. Each line is a request: the path of the file to write with the
recorder's JSON. The thread starts with the first `init_process_group`. The thread also runs while a collective waits,
because torch then releases the interpreter lock.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import contextmanager

TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

    from paceline.system.collective_state import RankBoard


_MODULE = "torch.distributed.distributed_c10d"

_board: RankBoard | None = None
_is_made = False


def answer_recorder_requests(path: str) -> None:
    """Serve requests for the flight recorder's JSON from pipe `path`, once a process group exists."""
    from paceline.system.lazy_import import when_loaded

    when_loaded(_MODULE, lambda module: _follow(module, path))


def _follow(module: ModuleType, path: str) -> None:
    """Wrap torch's functions that create process groups, to start the thread for requests."""
    import functools
    import itertools

    from paceline.collectives import step_hooks

    step_hooks.follow_collectives()

    def put_on_board(name: str, group: str, numbers: Iterator[int]) -> None:
        made = getattr(module, name)

        @functools.wraps(made)
        def call(*args: object, **kwargs: object) -> object:
            from paceline.system.collective_state import entry_text

            _start(path)
            with under_way(entry_text(group, name, "", "", 0, ""), next(numbers)):
                return made(*args, **kwargs)

        setattr(module, name, call)

    put_on_board("init_process_group", "torch", itertools.repeat(0))
    # A call of `new_group` can hang, too, because every rank has to call it, even if it will not be in the group.
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

    # Open the pipe for reading and writing: otherwise it would report its end when a writer closes it.
    _pipe = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    threading.Thread(target=_serve, args=(_pipe, os.path.dirname(path)), name="paceline-recorder", daemon=True).start()


def _serve(pipe: int, folder: str) -> None:
    while True:
        for name in os.read(pipe, 4096).decode("utf-8", "replace").split():
            try:
                _tell(os.path.join(folder, os.path.basename(name)))
            except Exception:  # other torch releases may lack the flight recorder
                continue


def _tell(path: str) -> None:
    from paceline.torch_private import recorded_collectives

    data = recorded_collectives()
    beside = f"{path}.new"
    with open(beside, "wb") as file:
        file.write(data)
    os.replace(beside, path)


def _close_pipe() -> None:
    # A forked child has no thread that reads the pipe, and must not read the requests to its parent.
    global _pipe
    if _pipe is not None:
        os.close(_pipe)
        _pipe = None


os.register_at_fork(after_in_child=_close_pipe)


def board(environ: Mapping[str, str] = os.environ) -> RankBoard | None:
    """Return this worker's record of running collectives, or None outside of a worker."""
    global _board, _is_made
    if not _is_made:
        _is_made = True
        from paceline.system.collective_state import FOLDER_VARIABLE, RankBoard
        from paceline.system.run_variables import nested_rank

        folder, rank = environ.get(FOLDER_VARIABLE), environ.get("PACELINE_RANK")
        if folder and rank and nested_rank(environ) is None:
            try:
                _board = RankBoard(os.path.join(folder, f"board_{rank}"))
            except (OSError, ValueError):  # no space, or no such folder: record no operations
                _board = None
    return _board


def begin(text: str, number: int = 0) -> int:
    """Record the start of collective number `number`, described by `text`. Return the argument of `end`."""
    present = _board if _is_made else board()
    return -1 if present is None else present.begin(text, number)


def end(place: int) -> None:
    """Remove the record of an ended collective. `place` is the result of `begin`."""
    if _board is not None:
        _board.end(place)


@contextmanager
def under_way(text: str, number: int = 0) -> Iterator[None]:
    """Record a collective during the block. `text` describes it."""
    place = begin(text, number)
    try:
        yield
    finally:
        end(place)


def _forget() -> None:
    # A forked child, such as a data loader's worker, takes part in no collective, so it must not write to the shared memory.
    global _board, _is_made
    _board, _is_made = None, True


os.register_at_fork(after_in_child=_forget)
