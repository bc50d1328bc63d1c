"""Simulated pipes and sockets, and the network between machines."""

from __future__ import annotations

import errno
import os
import select as real_select
import socket as real_socket
from collections.abc import Callable
from typing import Any

from tests.worlds import kernel as k
from tests.worlds.kernel import Kernel, Task

#: Bytes that a pipe or a connection takes before its writer has to wait, as on Linux.
CAPACITY = 1 << 16


class Wire:
    """The network in one direction of a connection.

    latency_s: Time of each message in seconds, at least.
    jitter_s: Additional time at random.
    stalls_until: Messages arrive only after this time. `is_cut` drops all messages, and also the end of the connection.
    """

    def __init__(self, latency_s: float = 0.0, jitter_s: float = 0.0) -> None:
        self.latency_s, self.jitter_s = latency_s, jitter_s
        self.stalls_until, self.is_cut = 0.0, False
        self.last = 0.0


class Channel:
    """One direction of a pipe or connection."""

    def __init__(self, kernel: Kernel, wire: Wire | None = None) -> None:
        self.kernel, self.wire = kernel, wire
        self.buffer = bytearray()
        self.sent = 0  # bytes that were sent but have not arrived yet
        self.is_ended = self.is_refused = False
        self.watchers: list[Task] = []

    def wake(self) -> None:
        watchers, self.watchers = self.watchers, []
        for task in watchers:
            self.kernel.wake(task)

    @property
    def room(self) -> int:
        return CAPACITY - len(self.buffer) - self.sent

    def put(self, data: bytes) -> None:
        wire = self.wire
        if wire is None:
            self.buffer += data
            self.wake()
            return
        self.sent += len(data)
        # A message may arrive in two pieces, at any byte.
        chance = self.kernel.chance
        at = int(chance.random() * len(data)) if chance.random() < 0.2 else 0
        for piece in (data[:at], data[at:]) if at else (data,):
            self._arrive(wire, lambda piece=piece: self._take(piece))

    def end(self) -> None:
        """Close the writer's side."""
        if self.wire is None:
            self._end()
        else:
            self._arrive(self.wire, self._end)

    def _arrive(self, wire: Wire, work: Callable[[], None]) -> None:
        kernel = self.kernel
        at_s = kernel.now + wire.latency_s + kernel.chance.random() * wire.jitter_s
        wire.last = at_s = max(at_s, wire.last, wire.stalls_until)
        kernel.after(at_s - kernel.now, lambda: self._pass(wire, work))

    def _pass(self, wire: Wire, work: Callable[[], None]) -> None:
        if wire.is_cut:
            return
        if wire.stalls_until > self.kernel.now:
            self._arrive(wire, work)
        else:
            work()

    def _take(self, data: bytes) -> None:
        self.sent -= len(data)
        if not self.is_refused:
            self.buffer += data
        self.wake()

    def _end(self) -> None:
        self.is_ended = True
        self.wake()


class End:
    """An open end of a pipe or connection, which may have several descriptors."""

    def __init__(self, kernel: Kernel, inbound: Channel | None, outbound: Channel | None) -> None:
        self.kernel, self.inbound, self.outbound = kernel, inbound, outbound
        self.references, self.is_nonblocking = 0, False

    def open(self) -> int:
        fd = next(self.kernel.fd_numbers)
        self.kernel.fds[fd] = self
        self.kernel.process.fds.add(fd)
        self.references += 1
        return fd

    def drop(self) -> None:
        self.references -= 1
        if self.references == 0:
            self.shut(real_socket.SHUT_RDWR)

    def shut(self, how: int) -> None:
        if self.outbound is not None and how != real_socket.SHUT_RD:
            if not self.outbound.is_refused:
                self.outbound.end()
            self.outbound.is_refused = True
            self.outbound.wake()
        if self.inbound is not None and how != real_socket.SHUT_WR:
            self.inbound.is_ended = self.inbound.is_refused = True
            self.inbound.wake()

    def is_readable(self) -> bool:
        return self.inbound is not None and bool(self.inbound.buffer or self.inbound.is_ended)

    def is_writable(self) -> bool:
        return self.outbound is not None and (self.outbound.room > 0 or self.outbound.is_refused)

    def read(self, size: int, *, is_nonblocking: bool = False) -> bytes:
        channel = self.inbound
        if channel is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        while not channel.buffer:
            if channel.is_ended:
                return b""
            if is_nonblocking or self.is_nonblocking:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            channel.watchers.append(self.kernel.task)
            self.kernel.park()
        data = bytes(channel.buffer[:size])
        del channel.buffer[:size]
        channel.wake()
        return data

    def write(self, data: bytes | memoryview, *, is_nonblocking: bool = False) -> int:
        channel = self.outbound
        if channel is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        while True:
            if channel.is_refused:
                raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
            if channel.room > 0:
                break
            if is_nonblocking or self.is_nonblocking:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            channel.watchers.append(self.kernel.task)
            self.kernel.park()
        data = bytes(data[: channel.room])
        channel.put(data)
        return len(data)


def pipe_ends(kernel: Kernel) -> tuple[End, End]:
    """Return the reading and the writing end of a pipe."""
    channel = Channel(kernel)
    return End(kernel, channel, None), End(kernel, None, channel)


def socket_ends(kernel: Kernel, wires: tuple[Wire | None, Wire | None] = (None, None)) -> tuple[End, End]:
    """Return two connected ends. The first wire leads from the first end to the second."""
    there, back = Channel(kernel, wires[0]), Channel(kernel, wires[1])
    return End(kernel, back, there), End(kernel, there, back)


def find(fd: int) -> End | None:
    return k.current.fds.get(fd) if k.current is not None else None


class Socket:
    """A socket object over a simulated end."""

    def __init__(self, family: int = -1, type: int = -1, proto: int = -1, fileno: int | None = None) -> None:
        if fileno is None:
            fileno = socket_ends(_kernel())[0].open()
        self._fd = fileno
        self._end: End = _kernel().fds[fileno]

    def fileno(self) -> int:
        return self._fd

    def setblocking(self, is_blocking: bool) -> None:
        self._end.is_nonblocking = not is_blocking

    def detach(self) -> int:
        fd, self._fd = self._fd, -1
        return fd

    def recv(self, size: int, flags: int = 0) -> bytes:
        return self._end.read(size)

    def send(self, data: bytes, flags: int = 0) -> int:
        return self._end.write(data)

    def sendall(self, data: bytes, flags: int = 0) -> None:
        view = memoryview(data)
        while view:
            view = view[self._end.write(view) :]

    def shutdown(self, how: int) -> None:
        self._end.shut(how)

    def close(self) -> None:
        if self._fd >= 0:
            close(self._fd)
            self._fd = -1

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def close(fd: int) -> None:
    kernel = _kernel()
    end = kernel.fds.pop(fd, None)
    if end is None:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    for process in kernel.processes.values():
        process.fds.discard(fd)
    end.drop()


def socketpair(*_: object) -> tuple[Socket, Socket]:
    ends = socket_ends(_kernel())
    return Socket(fileno=ends[0].open()), Socket(fileno=ends[1].open())


class Poll:
    """`select.poll` over simulated descriptors."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}

    def register(self, fd: int, mask: int = real_select.POLLIN | real_select.POLLOUT) -> None:
        self._masks[fd if isinstance(fd, int) else fd.fileno()] = mask

    def poll(self, timeout_ms: float | None = None) -> list[tuple[int, int]]:
        timeout_s = None if timeout_ms is None or timeout_ms < 0 else timeout_ms / 1000
        return wait(self._masks, timeout_s)


class Epoll:
    """`select.epoll` over simulated descriptors."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}

    def register(self, fd: int, mask: int) -> None:
        self._masks[fd] = mask

    def modify(self, fd: int, mask: int) -> None:
        if fd not in self._masks:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        self._masks[fd] = mask

    def unregister(self, fd: int) -> None:
        self.modify(fd, 0)
        del self._masks[fd]

    def poll(self, timeout_s: float = -1, most: int = -1) -> list[tuple[int, int]]:
        return wait(self._masks, None if timeout_s < 0 else timeout_s)


def wait(masks: dict[int, int], timeout_s: float | None) -> list[tuple[int, int]]:
    """Return the descriptors that are ready, with what they are ready for."""
    kernel = _kernel()
    kernel.point()
    until = None if timeout_s is None else kernel.now + timeout_s
    while True:
        found, channels = [], []
        for fd, mask in masks.items():
            end = kernel.fds.get(fd)
            if end is None:
                found.append((fd, real_select.POLLNVAL))
                continue
            ready = real_select.POLLIN if mask & real_select.POLLIN and end.is_readable() else 0
            ready |= real_select.POLLOUT if mask & real_select.POLLOUT and end.is_writable() else 0
            if ready:
                found.append((fd, ready))
            channels += [end.inbound if mask & real_select.POLLIN else None]
            channels += [end.outbound if mask & real_select.POLLOUT else None]
        if found or (until is not None and kernel.now >= until):
            return found
        assert kernel.task is not None
        for channel in channels:
            if channel is not None:
                channel.watchers.append(kernel.task)
        kernel.park(None if until is None else until - kernel.now)
        for channel in channels:
            if channel is not None and kernel.task in channel.watchers:
                channel.watchers.remove(kernel.task)


def select(read: list, write: list, other: list, timeout_s: float | None = None) -> tuple[list, list, list]:
    def number(one: Any) -> int:
        return one if isinstance(one, int) else one.fileno()

    masks: dict[int, int] = {}
    for one in read:
        masks[number(one)] = masks.get(number(one), 0) | real_select.POLLIN
    for one in write:
        masks[number(one)] = masks.get(number(one), 0) | real_select.POLLOUT
    found = dict(wait(masks, timeout_s))
    ready = real_select.POLLIN | real_select.POLLNVAL
    return (
        [one for one in read if found.get(number(one), 0) & ready],
        [one for one in write if found.get(number(one), 0) & real_select.POLLOUT],
        [],
    )


def _kernel() -> Kernel:
    assert k.current is not None
    return k.current
