"""One rank fails, and all say why: the first error that is not about communication is what each rank reports.

    rank 3 fails         writes its traceback to the store, raises its own error
    rank 1 waits for it  gets "connection closed by peer", looks into the store, raises WorkerError with rank 3's traceback
    rank 2 hears nothing its watcher sees the message, and ends the process if it doesn't come out within seconds

    rank 0 calls save()  and rank 1 step(): each waits for the other; the watchers compare what they wait in, and say so

Loaded on use: it imports torch.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch.distributed as dist

from paceline.parallel.failure.error_store import ErrorLine
from paceline.parallel.mesh import World

#: Of the backends' own texts alone: a script's "timed out" is its own error.
_COMMUNICATION = re.compile(
    r"gloo/|nccl|connection (closed|reset|refused)|broken pipe|timed out waiting \d+ ?ms|application timeout|"
    r"tcpstore|watchdog|monitoredbarrier",
    re.IGNORECASE,
)

_microbatch: int | None = None


@contextlib.contextmanager
def at_microbatch(index: int) -> Iterator[None]:
    """Name this microbatch in the report of an error that the block raises."""
    global _microbatch
    _microbatch = index
    yield
    # This line is not in a `finally`: after an error the number stays, for `guard`, further out, still has to report it.
    _microbatch = None


def is_communication(error: BaseException) -> bool:
    """True if the error says only that another rank is gone or silent."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)):
        return True
    if type(error).__name__ in ("CollectivesError", "ShutDownError"):
        return True
    return type(error) in (RuntimeError, dist.DistError) and bool(_COMMUNICATION.search(str(error)))


class FailureWatch:
    """Tells the other ranks of this one's failures, and this one of theirs. Does nothing in a world of one."""

    def __init__(self, world: World) -> None:
        self._line = _line_of(world)
        self._stage = world.coordinate("pipe") if world.extent("pipe") > 1 else None

    @contextlib.contextmanager
    def guard(self, what: str = "") -> Iterator[None]:
        """An error within the block is told to all ranks, which enter blocks in the same order.

        what: the call that this is, for messages; the same on all ranks.

        Raises:
            WorkerError: another rank's error has come first.
        """
        global _microbatch
        line = self._line
        if line is None or line.is_inside:
            yield
            return
        line.enter(what)
        try:
            yield
        except Exception as error:
            # An error of communication is only the echo of another rank's failure. That rank may need a moment to write
            # its own down.
            if is_communication(error) and line.wait_for_root():
                raise line.worker_error() from error
            line.tell(error, lost=is_communication(error), stage=self._stage, microbatch=_microbatch)
            if is_communication(error):
                raise line.lost(error) from error
            raise
        finally:
            line.leave()
            _microbatch = None


_line: ErrorLine | None = None


def _line_of(world: World) -> ErrorLine | None:
    """The one line to the other ranks that this process has, or None in a world of one."""
    global _line
    if world.store is None:
        return None
    if _line is None or _line.store is not world.store:
        if _line is not None:
            _line.close()
        _line = ErrorLine(world.rank, world.size, world.store)
    return _line
