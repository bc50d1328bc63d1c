"""Messages on a byte stream: 8 bytes with the length, big-endian, then the content."""

from __future__ import annotations

import struct

_HEADER = struct.Struct(">Q")


def frame(content: bytes) -> bytes:
    """Return the message for `content`: its length, then the content."""
    return _HEADER.pack(len(content)) + content


class FrameBuffer:
    """A buffer that collects a stream's bytes and returns whole messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        """Append the next bytes of the stream to the buffer."""
        self._bytes += data

    @property
    def has_frame(self) -> bool:
        """Whether the buffer has a whole message."""
        return len(self._bytes) >= _HEADER.size and len(self._bytes) >= self._end()

    def take(self) -> bytes | None:
        """Remove and return the buffer's next message, or None while it is incomplete."""
        if not self.has_frame:
            return None
        end = self._end()
        content = bytes(self._bytes[_HEADER.size : end])
        del self._bytes[:end]
        return content

    def _end(self) -> int:
        return _HEADER.size + int(_HEADER.unpack_from(self._bytes)[0])
