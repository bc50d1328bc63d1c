"""Keep the newest states in the memory of a process that outlives the attempt, so that the next attempt loses fewer steps.

    a run on one machine        the process that forks workers (`paceline.worker.spare`) keeps the states; `newest` reads them
    a run on several machines   each node's process `paceline.node.states` keeps the node's states, and a copy of another node's
                                states. After the loss of a node, the other nodes write these states as checkpoints

A call of save() that writes no file sends the state to that process, but so rarely that this costs at most 1 % of the time.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from paceline.checkpoint import files
from paceline.checkpoint.image import Camera, StateImage
from paceline.checkpoint.values import DenseArray
from paceline.errors import CheckpointError
from paceline.system import kept_states
from paceline.system.files import write_json
from paceline.system.memory import memory
from paceline.system.spare_client import KEY_VARIABLE, VARIABLE, keeper_of, path_here, socket_of
from paceline.system.state_copies import FREE_BYTES, StateSender

_log = logging.getLogger(__name__)
#: Maximum fraction of the training time that this process may spend on copying training states to memory.
_SHARE = 0.01
#: Stop copying training states after this many failures in a row. After each failure, pause for this many seconds.
_MOST_FAILURES, _PAUSE_S = 5, 10.0


class Neighbour:
    """A sender of this rank's training state to the process that forks workers."""

    def __init__(self) -> None:
        self._camera = Camera()
        #: Step -> copy of the training state, in memory shared with the process that keeps such copies on this node.
        self._images: dict[int, StateImage] = {}
        self._handing: threading.Thread | None = None
        self._next_s = self._cost_s = 0.0
        self._sender = StateSender()
        #: CPU seconds that it took to pass the latest copy of the state to this node's process and to another node.
        self._cpu_s = 0.0
        self._is_noted = False
        self._every = 1
        self._failures = 0

    def is_due(self, step: int, folder: Path) -> bool:
        """Return whether to keep this step's state in memory. folder: The checkpoint folder."""
        if step % self._every or self._failures >= _MOST_FAILURES or time.monotonic() < self._next_s:
            return False
        path = _keeper(folder)
        return bool(path) and not (self._handing and self._handing.is_alive()) and os.path.exists(socket_of(path))

    def keep(
        self,
        state: kept_states.State,
        encoded: Callable[[], tuple[bytes, Sequence[DenseArray]]],
        step_s: float | None,
        spent_s: float = 0.0,
    ) -> None:
        """Send a state to the process that keeps states in memory.

        Afterwards the arrays may change. `encoded` returns the header and arrays of the state's checkpoint file.

        step_s: Seconds of a training step. spent_s: CPU seconds that the caller has already spent on this state.
        """
        # Measure CPU time, because on a busy machine a thread also waits for a processor, for longer than it copies.
        began_s = time.thread_time() - spent_s
        try:
            header, arrays = encoded()
            size = len(header) + sum(array.size for array in arrays)
            # Check free memory only for the first copies: this takes a third of the CPU time of copying a small state.
            if len(self._images) < min(2, state["of"]) and memory().available < 2 * size + FREE_BYTES:
                raise OSError(0, f"{size >> 20} MiB twice, and {FREE_BYTES >> 20} MiB to spare, are not free")
            image = self._camera.take(header, arrays, step_s)
        except OSError as error:
            self._fail(error)
            return
        self._handing = threading.Thread(target=self._hand_over, args=(state, image), daemon=True)
        self._handing.start()
        cost_s = time.thread_time() - began_s
        # Let the assumed cost of a copy at most double from copy to copy, so that one slow call has little effect.
        self._cost_s = min(cost_s, 2 * self._cost_s or cost_s)
        if step_s:
            # Copy the state every 2^n steps, so that ranks with different costs copy common steps. The factor 2 stands
            # for two nodes: sending a copy to another node takes CPU time on both, which slows down their training.
            share = (self._cost_s + 2 * self._cpu_s / (os.cpu_count() or 1)) / (_SHARE * step_s)
            self._every = 1 << math.ceil(math.log2(max(1.0, share, self._sender.seconds / step_s)))

    def _hand_over(self, state: kept_states.State, image: StateImage) -> None:
        began_s, path = time.thread_time(), _keeper(Path(state["folder"]))
        try:
            image.wait()
            dropped = kept_states.keep(path, state, image.memory.fd)
        except OSError as error:
            # Don't reuse this memory: although the call failed, the process that keeps copies of states may use it.
            image.memory.close()
            self._fail(error)
            return
        self._failures = 0
        for step in dropped:
            if (free := self._images.pop(step, None)) is not None:
                self._camera.give_back(free)
        self._images[state["step"]] = image
        # Also free older copies that the answer does not list: a restarted process does not know the copies.
        for step in sorted(self._images)[:-2]:
            self._images.pop(step).memory.close()
        if KEY_VARIABLE in os.environ and path != path_here():
            self._note(state["rank"])
            self._sender.send(path_here(), bytes.fromhex(os.environ[KEY_VARIABLE]), state, image.bytes())
            self._cpu_s = time.thread_time() - began_s

    def _note(self, rank: int) -> None:
        """Tell the supervisor that the node keeps states of this attempt."""
        if not self._is_noted:
            name = ("attempts", os.environ["PACELINE_ATTEMPT"], f"kept_{rank}.json")
            with contextlib.suppress(OSError):  # without this file, the supervisor ignores the copied training states
                write_json(Path(os.environ["PACELINE_RUN_DIR"]).joinpath(*name), {})
                self._is_noted = True

    def _fail(self, error: OSError) -> None:
        self._failures += 1
        self._next_s = time.monotonic() + _PAUSE_S
        if self._failures == _MOST_FAILURES:
            _log.warning("the last steps are not kept in memory beside the checkpoints: %s", error.strerror or error)


def _keeper(folder: Path) -> str:
    """Return the socket path, without ".socket", of the process that keeps this folder's states, or ""."""
    if has_shared_spare(os.environ):
        return path_here()
    of_run = os.environ.get(files.DIR_VARIABLE, "")
    is_of_run = KEY_VARIABLE in os.environ and str(folder) in (of_run, f"{of_run}/{kept_states.PARALLEL}")
    return keeper_of(path_here()) if is_of_run else ""


def has_shared_spare(environ: Mapping[str, str]) -> bool:
    """Return whether one process forks all ranks, and so can hold their states."""
    path = environ.get(VARIABLE, "")
    is_one = "%" not in path or environ.get("LOCAL_WORLD_SIZE", "1") == environ.get("WORLD_SIZE", "1")
    return bool(path) and is_one


def newest(folder: Path) -> tuple[int, list[int]] | None:
    """Return the newest state held by the process that forks workers, or None.

    The result is the newest complete state's step, and a file descriptor for each rank's part. None: no such state.
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


def write_kept(path: str, folder: Path, ranks: Collection[int]) -> list[int]:
    """Write states from a process's memory as checkpoints. Return their steps.

    Only states of `ranks` that are newer than the folder's complete checkpoints are written.

    path: The socket path, without ".socket", of the process that keeps the states in its memory.

    Raises:
        OSError: A file can't be written.
    """
    newest_step = max(files.whole(files.parts_in(folder)), default=-1)
    try:
        found = kept_states.give(path, str(folder))
    except (OSError, ValueError) as error:
        print(f"no states in memory: {error}")
        return []
    written: list[int] = []
    for state, fd in found:
        try:
            if state["rank"] in ranks and state["step"] > newest_step:
                _write(folder, state, fd)
                written.append(state["step"])
        except CheckpointError as error:
            print(f"a state in memory is left out: {error}")
        finally:
            os.close(fd)
    return written


def _write(folder: Path, state: kept_states.State, fd: int) -> None:
    part = files.CheckpointPart(state["step"], state["rank"], state["of"], state["token"] if state["of"] > 1 else "")
    size = files.CheckpointFile(Path(f"/proc/self/fd/{fd}")).size
    folder.mkdir(parents=True, exist_ok=True)
    with mmap.mmap(fd, size, prot=mmap.PROT_READ) as content, memoryview(content) as data:
        files.write_image(folder / part.name, data, lambda: None)
