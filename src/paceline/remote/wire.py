"""Encode and decode frames, the messages between machines: a JSON header and `header["bytes"]` raw bytes.

    4 bytes, big-endian: length of the header | header | bytes

Frames travel over links and to login hosts, and are stored as objects in a datastore. File names in them may have
surrogate escapes, which JSON keeps. On a link, a request has a number `id`, and its reply has the same number as `re`.

Login hosts run this module with their own Python, 3.6 or later, so it needs only the standard library.
"""

import json
import struct
from typing import Any, Dict, Iterator, Tuple  # noqa: UP035

#: The JSON header of a frame. "op" names a request or event. In an answer, "re" is the id of the request.
Header = Dict[str, Any]  # noqa: UP006
Frame = Tuple[Header, bytes]  # noqa: UP006

#: The most bytes of a file in one frame. It is small, because an urgent frame waits until the current frame is written.
CHUNK_BYTES = 256 << 10

_LENGTH = struct.Struct(">I")
#: The largest header or content of a frame: enough for a manifest of some hundred thousand files.
_MOST_BYTES = 256 << 20

#: Default of the setting `silence_s`: after this many seconds without a message, the other end of a link counts as lost.
SILENCE_S = 15.0
#: The lowest allowed `silence_s`. A busy machine may delay a process for almost a second, which must not end a link.
LEAST_SILENCE_S = 1.0


class WireError(ValueError):
    """An error because received bytes are not a message (frame)."""


def frame(header: Header, data: bytes = b"") -> bytes:
    """Return a message (frame): the encoded header and data."""
    text = json.dumps({**header, "bytes": len(data)} if data else header).encode()
    return _LENGTH.pack(len(text)) + text + data


#: The frame that each side of a link sends when it has nothing else to send.
PING = frame({"op": "ping"})


class Frames:
    """A parser of messages (frames) from bytes in pieces of any size."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._header: Header | None = None
        self._wanted = _LENGTH.size

    @property
    def is_torn(self) -> bool:
        """Whether a frame has arrived only partly."""
        return bool(self._buffer) or self._header is not None

    def feed(self, data: bytes) -> "Iterator[Frame]":
        """Parse further bytes. Yield each frame that is now complete.

        Raises:
            WireError: The bytes are not a frame.
        """
        self._buffer += data
        found = self._next()
        while found is not None:
            yield found
            found = self._next()

    def _next(self) -> "Frame | None":
        if self._header is None:
            if len(self._buffer) < _LENGTH.size:
                return None
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > _MOST_BYTES:
                raise WireError(f"a header of {length} bytes: {bytes(self._buffer[:80])!r}")
            if len(self._buffer) < _LENGTH.size + length:
                return None
            text = bytes(self._buffer[_LENGTH.size : _LENGTH.size + length])
            try:
                header = json.loads(text.decode())
                self._wanted = int(header.get("bytes", 0))
            except (ValueError, AttributeError, TypeError):
                raise WireError(f"no header: {text[:80]!r}") from None
            if not 0 <= self._wanted <= _MOST_BYTES:
                raise WireError(f"a frame of {self._wanted} bytes")
            self._header = header
            del self._buffer[: _LENGTH.size + length]
        if len(self._buffer) < self._wanted:
            return None
        header, self._header = self._header, None
        with memoryview(self._buffer) as view:
            data = bytes(view[: self._wanted])
        del self._buffer[: self._wanted]
        return header, data


def ping_s(silence_s: float) -> float:
    """Return the seconds between two pings, a fifth of `silence_s`."""
    return silence_s / 5
