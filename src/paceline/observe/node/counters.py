"""Counters of TCP connections (sock_diag(7), Linux).

The kernel counts TCP bytes for each connection, not for each process. Each connection has an inode number. The open
files of a process (/proc/<pid>/fd) show which inode numbers belong to the process.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence

#: Constants and layouts of messages from sock_diag(7), linux/inet_diag.h and linux/tcp.h.
_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP = 4, 20, 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_INET_DIAG_INFO, _ESTABLISHED = 2, 1 << 1
_HEADER, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=HH")
_MESSAGE_BYTES, _INODE_AT = 72, 68
#: Format and offset of two counters in tcp_info: the bytes that the peer has acknowledged, and the bytes received.
_COUNTS, _COUNTS_AT = struct.Struct("=QQ"), 120
#: Maximum share of a core for listing the processes' open files, and minimum seconds between two lists.
_SHARE, _FILES_S = 0.0005, 10.0
_LIMIT_S = 1.0


class TcpCounts:
    """A meter of TCP traffic between two calls of `look`."""

    def __init__(self) -> None:
        self._ranks: dict[int, str] = {}
        self._next_s = 0.0
        self._before: dict[int, tuple[int, int]] = {}
        self._at_s = 0.0
        self._is_told = True

    def look(self, living: Mapping[str, Sequence[int]]) -> dict[str, tuple[float, float]]:
        """Return {rank: (received, sent)} in bytes per second since the last call.

        Empty at the first call, and always if the kernel is too old or denies access to the counters.

        living: Rank -> process ids of the rank's processes.
        """
        if not self._is_told or not living:
            return {}
        now = time.monotonic()
        if now >= self._next_s:
            began = time.thread_time()
            self._ranks = {inode: rank for rank, pids in living.items() for pid in pids for inode in _sockets(pid)}
            self._next_s = now + max(_FILES_S, (time.thread_time() - began) / _SHARE)
        try:
            counts = {inode: both for inode, both in connections() if inode in self._ranks}
        except OSError:
            # Never read the counters again: the kernel is too old, or a container has no permission.
            self._is_told = False
            return {}
        passed, self._at_s = now - self._at_s, now
        before, self._before = self._before, counts
        if passed <= 0 or passed == now:
            return {}
        found = {rank: [0, 0] for rank in living}
        for inode, (sent, received) in counts.items():
            rank = self._ranks[inode]
            # A connection that is new to this meter may be old, so count its bytes only from the next call on.
            was = before.get(inode, (sent, received))
            if rank in found:
                found[rank][0] += max(0, received - was[1])
                found[rank][1] += max(0, sent - was[0])
        return {rank: (received / passed, sent / passed) for rank, (received, sent) in found.items()}


def connections() -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield (inode, (bytes sent, bytes received)) of each open TCP connection in this network namespace."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as asked:
        asked.settimeout(_LIMIT_S)
        for family in (socket.AF_INET, socket.AF_INET6):
            request = struct.pack("=BBBxI48x", family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), _ESTABLISHED)
            size = _HEADER.size + len(request)
            asked.send(_HEADER.pack(size, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0) + request)
            yield from _answers(asked)


def _answers(asked: socket.socket) -> Iterator[tuple[int, tuple[int, int]]]:
    while True:
        data = asked.recv(1 << 18)
        at = 0
        while at + _HEADER.size <= len(data):
            size, kind, _, _, _ = _HEADER.unpack_from(data, at)
            if kind == _NLMSG_DONE:
                return
            if kind == _NLMSG_ERROR:
                number = -struct.unpack_from("=i", data, at + _HEADER.size)[0]
                raise OSError(number, os.strerror(number))
            message = data[at + _HEADER.size : at + size]
            if (counts := _counts(message)) is not None:
                yield struct.unpack_from("=I", message, _INODE_AT)[0], counts
            at += (size + 3) & ~3


def _counts(message: bytes) -> tuple[int, int] | None:
    at = _MESSAGE_BYTES
    while at + _ATTRIBUTE.size <= len(message):
        size, kind = _ATTRIBUTE.unpack_from(message, at)
        if kind == _INET_DIAG_INFO and size >= _ATTRIBUTE.size + _COUNTS_AT + _COUNTS.size:
            sent, received = _COUNTS.unpack_from(message, at + _ATTRIBUTE.size + _COUNTS_AT)
            return sent, received
        at += max((size + 3) & ~3, 4)
    return None


def _sockets(pid: int) -> Iterator[int]:
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for name in names:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            yield int(target[8:-1])
