"""Keep the newest states in the memory of a warm spare process, so that the next attempt loses fewer steps.

The warm spare (`paceline.worker.spare`) is a process on the same machine that outlives the attempt. Calls of save() that write
no file send it an image of the state, as often as that takes at most 1 % of the training's time.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from paceline.checkpoint.image import Camera, StateImage
from paceline.checkpoint.values import DenseArray
from paceline.system import kept_states
from paceline.system.memory import memory
from paceline.system.spare_client import VARIABLE, path_here, socket_of

_log = logging.getLogger(__name__)
#: Share of the training's time that keeping states in memory may take.
_SHARE = 0.01
#: After this many failures in a row, no more states are kept; after each failure, pause for this many seconds.
_MOST_FAILURES, _PAUSE_S = 5, 10.0
#: Free memory in bytes that must remain, or no state is kept.
_FREE_BYTES = 1 << 30


class Neighbour:
    """A sender of this rank's training state to the process that forks workers."""

    def __init__(self) -> None:
        self._camera = Camera()
        #: Step -> the image whose memory is shared with the node's spare Python process.
        self._images: dict[int, StateImage] = {}
        self._handing: threading.Thread | None = None
        self._next_s = self._cost_s = 0.0
        self._every = 1
        self._failures = 0

    def is_due(self, step: int) -> bool:
        """Return whether to send this step's state now to the process that forks workers."""
        if step % self._every or self._failures >= _MOST_FAILURES or time.monotonic() < self._next_s:
            return False
        if not has_shared_spare(os.environ):
            return False
        return not (self._handing and self._handing.is_alive()) and os.path.exists(socket_of(path_here()))

    def keep(
        self,
        state: kept_states.State,
        encoded: Callable[[], tuple[bytes, Sequence[DenseArray]]],
        step_s: float | None,
    ) -> None:
        """Send a state to the process that forks workers.

        Afterwards the caller may change the state's arrays. `encoded` returns the header and arrays of its checkpoint file.
        """
        began = time.monotonic()
        header, arrays = encoded()
        size = len(header) + sum(array.size for array in arrays)
        try:
            if len(self._images) < 2 and memory().available < 2 * size + _FREE_BYTES:
                raise OSError(0, f"{size >> 20} MiB twice, and {_FREE_BYTES >> 20} MiB to spare, are not free")
            image = self._camera.take(header, arrays, step_s)
        except OSError as error:
            self._fail(error)
            return
        self._handing = threading.Thread(target=self._hand_over, args=(state, image), daemon=True)
        self._handing.start()
        cost_s = time.monotonic() - began
        # Count at most twice the previous cost of keeping a state, so that one slow call changes little.
        self._cost_s = min(cost_s, 2 * self._cost_s or cost_s)
        if step_s:
            # Keep every 2^n-th step, so that ranks with different costs have steps in common.
            self._every = 1 << math.ceil(math.log2(max(1.0, self._cost_s / (_SHARE * step_s))))

    def _hand_over(self, state: kept_states.State, image: StateImage) -> None:
        try:
            image.wait()
            dropped = kept_states.keep(path_here(), state, image.memory.fd)
        except OSError as error:
            # Don't use this memory again: the spare process may have received it.
            image.memory.close()
            self._fail(error)
            return
        self._failures = 0
        for step in dropped:
            if (free := self._images.pop(step, None)) is not None:
                self._camera.give_back(free)
        self._images[state["step"]] = image
        # Free old images here too: a spare process that has started again does not report them as dropped.
        for step in sorted(self._images)[:-2]:
            self._images.pop(step).memory.close()

    def _fail(self, error: OSError) -> None:
        self._failures += 1
        self._next_s = time.monotonic() + _PAUSE_S
        if self._failures == _MOST_FAILURES:
            _log.warning("the last steps are not kept in memory beside the checkpoints: %s", error.strerror or error)


def has_shared_spare(environ: Mapping[str, str]) -> bool:
    """Return whether one process forks all ranks, and so can hold their states."""
    path = environ.get(VARIABLE, "")
    is_one = "%" not in path or environ.get("LOCAL_WORLD_SIZE", "1") == environ.get("WORLD_SIZE", "1")
    return bool(path) and is_one


def newest(folder: Path) -> tuple[int, list[int]] | None:
    """Return the newest state held by the process that forks workers, or None.

    The state is complete. The result is its step, and a file descriptor for each rank's part.
    """
    path = path_here()
    if not has_shared_spare(os.environ) or not os.path.exists(socket_of(path)):
        return None
    try:
        found = kept_states.give(path, str(folder))
    except (OSError, ValueError) as error:
        _log.warning("the last steps in memory are lost: %s", error)
        return None
    together: dict[tuple[int, int, str], dict[int, int]] = {}
    for state, fd in found:
        together.setdefault((state["step"], state["of"], state["token"]), {})[state["rank"]] = fd
    complete = [(key, parts) for key, parts in together.items() if len(parts) == key[1]]
    (step, _, _), chosen = max(complete, key=lambda item: item[0][0], default=((0, 0, ""), {}))
    for _, fd in found:
        if fd not in chosen.values():
            os.close(fd)
    return (step, [chosen[rank] for rank in sorted(chosen)]) if chosen else None
