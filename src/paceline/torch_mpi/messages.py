"""Point-to-point messages, which may be sent and awaited in any order, outside of the communication thread.

Each message is an MPI request. MPI moves a long message only while a thread polls the request. So each waiting thread
polls, and a background thread polls while messages are in flight. Importing this module loads torch and mpi4py.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time

import torch
from mpi4py import MPI

from paceline.collectives.errors import CollectivesError
from paceline.torch_mpi import buffers
from paceline.torch_mpi.comm_thread import Lane
from paceline.torch_mpi.work import LONGEST_SLEEP_S, SHORTEST_SLEEP_S, MpiWork, wait_until

_LOOKS = 2000


class Messages:
    """The point-to-point messages of one process group."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._lock = threading.Lock()
        self._open: list[MessageWork] = []
        self._thread: threading.Thread | None = None

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> MpiWork:
        tensor = buffers.plain(self._one(tensors, tag))
        text = f"send({tensor.dtype}, {tensor.numel()} elements, to rank {to} of the group, tag {tag})"
        return self._follow(MessageWork(self._lane, self._lane.comm.Isend(_bytes(tensor), to, tag), tensor, None, text))

    def receive(self, tensors: list[torch.Tensor], source: int | None, tag: int) -> MpiWork:
        """Receive into the tensors from rank `source` (None: any rank). Return the message's handle."""
        into = self._one(tensors, tag)
        tensor = buffers.room(into)
        sender = "any rank" if source is None else f"rank {source} of the group"
        text = f"recv({tensor.dtype}, {tensor.numel()} elements, from {sender}, tag {tag})"
        request = self._lane.comm.Irecv(_bytes(tensor), MPI.ANY_SOURCE if source is None else source, tag)
        return self._follow(MessageWork(self._lane, request, tensor, into, text))

    @property
    def is_busy(self) -> bool:
        return bool(self._open)

    def close(self) -> None:
        """Cancel receives without a message, and wait until all sends are complete."""
        with self._lock:
            left = list(self._open)
        for work in left:
            work.give_up()
        if (thread := self._thread) is not None:
            # The thread ends when no message is in flight. Wait for its end, because only then the communicator may be freed.
            thread.join()

    def _one(self, tensors: list[torch.Tensor], tag: int) -> torch.Tensor:
        self._lane.check()
        if len(tensors) != 1:
            raise CollectivesError(f"a message is one tensor, not {len(tensors)}. Send them one by one.")
        buffers.check(tensors[0])
        if not 0 <= tag <= (1 << 30):
            raise CollectivesError(f"tag={tag}: MPI's tags go from 0 to {1 << 30}.")
        return tensors[0]

    def _follow(self, work: MessageWork) -> MessageWork:
        # A short message is often complete at once. Then no thread has to poll it.
        if work.is_completed():
            return work
        with self._lock:
            self._open.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._look, name="paceline-messages", daemon=True)
                self._thread.start()
        return work

    def _look(self) -> None:
        """Poll all messages until none is in flight. The polling thread runs this."""
        sleep_s = SHORTEST_SLEEP_S
        while True:
            with self._lock:
                works = list(self._open)
            # Don't hold the lock: a completed message calls the script's callbacks, which may send another message.
            finished = [work for work in works if work.is_completed()]
            with self._lock:
                # Filter the list and don't replace it, because a callback may have added a message in the meantime.
                self._open = [work for work in self._open if work not in finished]
                # Decide this while holding the lock: if `_follow` adds a message later, it finds no thread and starts one.
                if not self._open:
                    self._thread = None
                    return
            sleep_s = SHORTEST_SLEEP_S if finished else min(sleep_s * 1.1, LONGEST_SLEEP_S)
            time.sleep(sleep_s)


class MessageWork(MpiWork):
    """The handle of a message in flight, with the memory that MPI uses."""

    def __init__(
        self, lane: Lane, request: MPI.Request, memory: torch.Tensor, into: torch.Tensor | None, text: str
    ) -> None:
        super().__init__(concurrent.futures.Future(), text)
        self._lane = lane
        self._request = request
        self._memory = memory
        self._into = into
        self._source = -1
        #: Lock for testing a request: threads that wait and the thread of `Messages` test it one after the other.
        self._looking = threading.Lock()

    def is_completed(self) -> bool:
        return self._future.done() or self._look()

    def source_rank(self) -> int:
        """Wait for the message, and return the rank of its sender."""
        self._wait(None)
        return self._source

    _source_rank = source_rank

    def give_up(self) -> None:
        """Cancel a receive. A sent message is not cancelled."""
        with self._looking:
            if self._into is not None and not self._future.done():
                self._request.Cancel()

    def _wait(self, timeout_s: float | None) -> None:
        if not self._future.done():
            wait_until(
                self._look,
                self._lane.timeout_s if timeout_s is None else timeout_s,
                f"in {self._text}: the other rank has not made the call that belongs to it. "
                "Compare the ranks' sends and receives, or give init_process_group a longer timeout.",
                looks=_LOOKS,
            )
        super()._wait(0)

    def _look(self) -> bool:
        """Poll the MPI request once. Return whether it has ended."""
        with self._looking:
            if self._future.done():
                return True
            status = MPI.Status()
            try:
                if not self._request.Test(status):
                    return False
                self._settle(status)
            except MPI.Exception as error:
                problem = CollectivesError(f"{self._text} failed: {error}. Does the sender's tensor have another size?")
                problem.__cause__ = error
                self._future.set_exception(problem)
            return True

    def _settle(self, status: MPI.Status) -> None:
        if self._into is None:
            self._future.set_result([self._memory])
            return
        wanted, got = self._memory.numel() * self._memory.element_size(), status.Get_count(MPI.BYTE)
        # Check for cancellation before comparing sizes, because a canceled receive has no meaningful size.
        if status.Is_cancelled():
            self._future.set_exception(
                CollectivesError(f"{self._text}: the process group was destroyed before it came.")
            )
        elif got != wanted:
            self._future.set_exception(
                CollectivesError(f"{self._text} wants {wanted} bytes, but rank {status.Get_source()} has sent {got}.")
            )
        else:
            self._source = status.Get_source()
            # Write the values before completing the future, because a waiting thread reads the tensor at once.
            buffers.put(self._memory, self._into)
            self._future.set_result([self._into])


def _bytes(tensor: torch.Tensor) -> buffers.MpiBuffer:
    # Send bytes, because sender and receiver may use different dtypes. MPI's counts have 32 bits, so send messages of 2 GiB
    # or more as elements.
    if tensor.numel() * tensor.element_size() < (1 << 31):
        return buffers.raw(tensor), MPI.BYTE
    return buffers.elements(tensor)
