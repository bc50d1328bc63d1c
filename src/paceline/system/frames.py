"""Length-prefixed messages on a byte stream: the length in 8 bytes, big-endian, then the content."""

from __future__ import annotations

import struct

_HEADER = struct.Struct(">Q")


def frame(content: bytes) -> bytes:
    """Return `content` with its length in front."""
    return _HEADER.pack(len(content)) + content


class FrameBuffer:
    """A buffer of the bytes read from a stream so far, which returns whole messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        """Append bytes in the order in which the stream delivered them."""
        self._bytes += data

    @property
    def has_frame(self) -> bool:
        """Whether `take` would return a message."""
        return len(self._bytes) >= _HEADER.size and len(self._bytes) >= self._end()

    def take(self) -> bytes | None:
        """Remove and return the next message, or return None until the whole message has arrived."""
        if not self.has_frame:
            return None
        end = self._end()
        content = bytes(self._bytes[_HEADER.size : end])
        del self._bytes[:end]
        return content

    def _end(self) -> int:
        return _HEADER.size + int(_HEADER.unpack_from(self._bytes)[0])
