"""The bytes of a checkpoint file, copied from the training's memory while the training continues.

    fork     CPU    a child process, in which the state cannot change, copies it; training continues right after the fork
    stream   GPU    the GPU copies the state into pinned memory, while the training's own kernels run
    copy     else   this process copies the state before training continues

Each way fills an image in shared memory. The next checkpoint reuses this memory, because allocating new pages takes
longer than copying.

A forked child has one thread, and locks that other threads held at the fork stay locked. So the child makes only system
calls, on memory views made before the fork. The child closes inherited connections, and ends without Python's exit
handlers. Paceline does not fork in two cases: the process has mapped the memory of a device, which a child cannot use;
or a loaded library has fork handlers that may block.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import mmap
import os
import select
import signal
import sys
import threading
import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paceline.checkpoint.values import DenseArray

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)
#: Fork a child to copy `_LEAST_FORKED` bytes or more, if the process has at most `_MOST_TIMES` as much memory.
_LEAST_FORKED, _MOST_TIMES = 64 << 20, 16
#: Bytes per second that a forked child is assumed to copy, until the speed of the first copy is measured.
_GUESSED_RATE = 1.5 * (1 << 30)
#: Seconds after which a forked child that still copies counts as hung.
_CHILD_S = 120.0
#: A fork that takes more seconds than this has copied a page table of small pages. Then ask the kernel for large pages again.
_SLOW_FORK_S = 0.01
_PAGE, _HUGE = 4096, 2 << 20
#: Three constants of madvise(2) that Python's mmap lacks, and one of mallopt(3).
_ADVISE_HUGE, _COLLAPSE, _POPULATE, _TRIM_THRESHOLD = 14, 25, 23, -1
#: Modules whose fork handlers (pthread_atfork) may block: if one is loaded, no forked child copies the state.
_HANDLES_FORKS = ("grpc", "cygrpc")


class SharedMemory:
    """Anonymous shared memory, freed when the last process that uses it ends.

    Attributes:
        fd: The file descriptor of the memory.
        size: Size of the memory in bytes, enough for the largest checkpoint so far.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("paceline-checkpoint", os.MFD_CLOEXEC)
        self.size = 0
        self._pinned: int | None = None

    def reserve(self, size: int) -> None:
        """Enlarge this shared memory to at least `size` bytes."""
        if size > self.size:
            rounded = -(-size // _HUGE) * _HUGE
            os.ftruncate(self.fd, rounded)
            self.unpin()
            self.map = mmap.mmap(self.fd, rounded)
            self.size = rounded

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def populate(self) -> None:
        """Allocate the shared memory's pages now, so that later writes are fast."""
        _advise(self.address, self.size, _POPULATE)

    def pin(self) -> None:
        """Register the shared memory with CUDA, so that GPUs copy faster. Failures are ignored."""
        if self._pinned is None:
            import torch

            torch.cuda.cudart().cudaHostRegister(self.address, self.size, 0)  # type: ignore[no-untyped-call]
            self._pinned = self.address

    def unpin(self) -> None:
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            import torch

            torch.cuda.cudart().cudaHostUnregister(pinned)  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Release this process's descriptor of the memory."""
        self.unpin()
        os.close(self.fd)


@dataclass
class StateImage:
    """The bytes of a checkpoint file in memory, complete after `wait`.

    Attributes:
        size: The number of bytes.
        way: What copies the state: a forked child ("fork"), the GPU ("stream") or this process ("copy").
    """

    memory: SharedMemory
    size: int
    way: str = "copy"
    waits: list[Callable[[], None]] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until all bytes of the checkpoint are in memory.

        Raises:
            OSError: The child process that copies has failed.
        """
        while self.waits:
            self.waits.pop()()

    def bytes(self) -> memoryview:
        return memoryview(self.memory.map)[: self.size]


class Camera:
    """A maker of in-memory copies of states, which reuses its shared memory."""

    def __init__(self) -> None:
        self._memory: SharedMemory | None = None
        self._rate = _GUESSED_RATE
        self._fork_s = 0.0
        self._refused = ""
        self._is_prepared = False

    def prepare(self, arrays: Sequence[DenseArray]) -> None:
        """On the first call, start a thread that allocates memory for checkpoints of `arrays`."""
        if not self._is_prepared and _bytes_of(arrays) >= _LEAST_FORKED and not _danger(_mappings()):
            threading.Thread(target=self._prepare, args=(_bytes_of(arrays),), daemon=True).start()
        self._is_prepared = True

    def _prepare(self, size: int) -> None:
        memory = SharedMemory()
        with contextlib.suppress(OSError):
            memory.reserve(size + _HUGE)
            memory.populate()
        _enlarge_pages()
        # If calls of `take` and `give_back` have meanwhile left other memory here for reuse, keep that memory.
        self._memory = self._memory or memory

    def take(self, header: bytes, arrays: Sequence[DenseArray], step_s: float | None) -> StateImage:
        """Copy a checkpoint file's bytes to memory. Afterwards the arrays may change.

        step_s: Expected seconds until the arrays change, or None if unknown. If a forked child needs longer to copy the
        arrays, this process copies them instead: after a fork the kernel must copy each page that changes.

        Raises:
            OSError: There is too little memory.
        """
        placed, size = [], len(header)
        for array in arrays:
            placed.append((array, size))
            size += array.size
        memory, self._memory = self._memory or SharedMemory(), None
        memory.reserve(size)
        memory.map[: len(header)] = header
        image = StateImage(memory, size)
        image.waits = _copy_by_stream(memory, [(array, offset) for array, offset in placed if array.is_on_gpu])
        left = [(array, offset) for array, offset in placed if not array.is_on_gpu]
        if image.waits:
            image.way = "stream"
        elif self._may_fork(_bytes_of(arrays), step_s):
            left = self._fork(image, left)
        for array, offset in left:
            # ctypes releases the GIL during memmove, so other threads can run.
            ctypes.memmove(memory.address + offset, array.address, array.size)
        return image

    def give_back(self, image: StateImage) -> None:
        """Let the next checkpoint reuse the memory of `image`."""
        if self._memory is not None:
            image.memory.close()
            return
        self._memory = image.memory
        if image.way == "fork" and self._fork_s > _SLOW_FORK_S:
            _enlarge_pages()

    def _may_fork(self, size: int, step_s: float | None) -> bool:
        if size < _LEAST_FORKED or (step_s is not None and step_s < 1.2 * size / self._rate):
            return False
        with open("/proc/self/statm", encoding="ascii") as file:
            _, resident, shared, *_ = map(int, file.read().split())
        return (resident - shared) * mmap.PAGESIZE <= _MOST_TIMES * size

    def _fork(self, image: StateImage, placed: list[tuple[DenseArray, int]]) -> list[tuple[DenseArray, int]]:
        """Fork a child that copies (array, offset) pairs into `image`. Return the pairs that it cannot copy."""
        mappings = _mappings()
        if why := self._refused or _danger(mappings):
            if not self._refused:
                _log.warning("checkpoints are copied before training continues, instead of by a fork: %s", why)
            self._refused = why
            return placed
        ends = [end for _, end in mappings.shared]
        private: list[tuple[DenseArray, int]] = []
        shared: list[tuple[DenseArray, int]] = []
        for array, offset in placed:
            place = bisect_right(ends, array.address)
            is_shared = place < len(ends) and mappings.shared[place][0] < array.address + array.size
            (shared if is_shared else private).append((array, offset))
        try:
            child = _Child(image.memory.fd, private)
        except OSError as error:
            self._refused = f"the fork failed: {error.strerror or error}"
            _log.warning("checkpoints are copied before training continues: %s", self._refused)
            return placed
        self._fork_s = child.fork_s
        image.way = "fork"

        def wait() -> None:
            try:
                self._rate = sum(array.size for array, _ in private) / max(child.wait(), 1e-3)
            except OSError as error:
                self._refused = str(error)
                raise

        image.waits.append(wait)
        return shared


class _Child:
    """A child process that copies arrays into shared memory and ends.

    Attributes:
        fork_s: How many seconds the fork took.
    """

    def __init__(self, fd: int, placed: Sequence[tuple[DenseArray, int]]) -> None:
        from time import monotonic

        self._now = monotonic
        views = [(array.data, offset) for array, offset in placed]
        self._result, result = os.pipe()
        kept = sorted((fd, result))
        everything = signal.valid_signals()
        # Disable garbage collection in the child: it would run finalizers of the script's objects, which might remove files.
        collects = gc.isenabled()
        gc.disable()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, everything)
        self._began = monotonic()
        try:
            with warnings.catch_warnings():
                # Ignore warnings of Python and JAX about forks of processes with threads: this child makes only system calls.
                warnings.simplefilter("ignore")
                self._pid = os.fork()
            if self._pid == 0:
                _copy_and_leave(views, fd, result, kept, everything)
        except BaseException:
            os.close(self._result)
            raise
        finally:
            self.fork_s = monotonic() - self._began
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(result)
            if collects:
                gc.enable()

    def wait(self) -> float:
        """Wait until the child process has copied all arrays. Return the seconds since the fork.

        Raises:
            OSError: The child failed, was killed, or hangs.
        """
        try:
            poll = select.poll()  # select() refuses descriptors from 1024 on
            poll.register(self._result, select.POLLIN)
            ready = poll.poll(_CHILD_S * 1000)
            said = os.read(self._result, 16) if ready else b""
        finally:
            os.close(self._result)
        took = self._now() - self._began
        if not ready:
            os.kill(self._pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):  # the script may have reaped this child
            os.waitpid(self._pid, 0)
        if said != b"0":
            why = os.strerror(int(said)) if said else "it was killed" if ready else f"it took over {_CHILD_S:.0f} s"
            raise OSError(int(said or 5), f"the process that copies the state failed: {why}")
        return took


def _copy_and_leave(
    views: list[tuple[memoryview, int]], fd: int, result: int, kept: list[int], signals: set[signal.Signals]
) -> None:
    """In a forked child, write `views`, as (bytes, offset), to `fd`. Report "0" or an error number to `result`, and exit."""
    said = b"5"
    try:
        # Only the parent may handle signals such as SIGTERM. Block them again: a fork handler may have unblocked them.
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        # Close inherited files except `kept`: else the parent's connections and locks would stay open after its end.
        low, high = kept
        os.closerange(0, low)
        os.closerange(low + 1, high)
        os.closerange(high + 1, 1 << 20)
        for view, offset in views:
            done = 0
            while done < len(view):
                done += os.pwrite(fd, view[done:], offset + done)
        said = b"0"
    except OSError as error:
        said = str(error.errno or 5).encode()
    finally:
        try:
            os.write(result, said)
        finally:  # the parent may be gone, which makes the write fail
            os._exit(0)


@dataclass(frozen=True)
class _Mappings:
    """The shared memory and the devices that this process has mapped.

    shared: Sorted address ranges of shared memory. A forked child does not get a copy of shared memory.
    devices: The paths of the mapped devices.
    """

    shared: list[tuple[int, int]]
    devices: list[str]


def _mappings() -> _Mappings:
    shared: list[tuple[int, int]] = []
    devices: list[str] = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            place, kind, *rest = line.split(None, 5)
            if kind[3] == "s" and kind[1] == "w":
                begin, _, end = place.partition("-")
                shared.append((int(begin, 16), int(end, 16)))
            name = rest[3].strip() if len(rest) > 3 else ""
            if name.startswith("/dev/") and not name.startswith(("/dev/shm/", "/dev/zero")):
                devices.append(name)
    return _Mappings(shared, devices)


def _danger(mappings: _Mappings) -> str:
    """Return why this process must not fork, or ""."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "CUDA is in use"
    if mappings.devices:
        return f"{mappings.devices[0]} is mapped, and a device's memory can't be in two processes"
    if loaded := [name for name in _HANDLES_FORKS if name in sys.modules]:
        return f"{loaded[0]} is loaded, whose handlers of forks may block"
    return "" if getattr(sys, "_is_gil_enabled", lambda: True)() else "this Python has no global lock"


def _copy_by_stream(memory: SharedMemory, placed: Sequence[tuple[DenseArray, int]]) -> list[Callable[[], None]]:
    if not placed:
        return []
    import torch

    memory.pin()
    waits: list[Callable[[], None]] = []
    by_device: dict[torch.device, list[tuple[torch.Tensor, int]]] = {}
    for array, offset in placed:
        by_device.setdefault(array.tensor.device, []).append((array.tensor, offset))
    for device, tensors in by_device.items():
        current = torch.cuda.current_stream(device)
        beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        try:
            # Clone on the GPU, which is twenty times as fast as a copy to the CPU. Training may then change the original tensors.
            sources, is_copied = [(tensor.clone(), offset) for tensor, offset in tensors], True
        except torch.OutOfMemoryError:
            sources, is_copied = tensors, False
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            for source, offset in sources:
                source_bytes = source.reshape(-1).view(torch.uint8)
                if source_bytes.numel():
                    room = torch.frombuffer(memory.map, dtype=torch.uint8, count=source_bytes.numel(), offset=offset)
                    room.copy_(source_bytes, non_blocking=True)
                    source.record_stream(beside)
        if not is_copied:
            # Make later GPU kernels wait for this copy, because they may change the state. The CPU does not wait.
            current.wait_stream(beside)
        waits.append(beside.record_event().synchronize)
    return waits


def _enlarge_pages() -> None:
    """Ask the kernel for memory pages of 2 MiB, to speed up forks."""
    # Let malloc keep freed memory for the next step, because new memory from the kernel would have small pages.
    _libc.mallopt(_TRIM_THRESHOLD, (1 << 31) - 1)
    begin = end = 0
    with open("/proc/self/smaps", encoding="utf-8", errors="replace") as file:
        for line in file:
            word, _, rest = line.partition(" ")
            if not word.endswith(":"):
                kind, *_, name = rest.rstrip("\n").split(" ")
                begin, end = (int(number, 16) for number in word.split("-"))
                if kind != "rw-p" or name not in ("", "[heap]"):
                    begin = end = 0
            # Skip regions that are mostly empty, such as a thread's stack: with large pages they would take more memory.
            elif word == "Anonymous:" and int(rest.split()[0]) << 11 >= end - begin > _HUGE:
                begin, end = -(-begin // _HUGE) * _HUGE, end // _HUGE * _HUGE
                _advise(begin, end - begin, _ADVISE_HUGE)
                _advise(begin, end - begin, _COLLAPSE)


def _advise(address: int, size: int, advice: int) -> None:
    _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), advice)


_libc = ctypes.CDLL(None)


def _bytes_of(arrays: Sequence[DenseArray]) -> int:
    return sum(array.size for array in arrays)
