"""Frames: what is said to another machine, as a JSON header and as many raw bytes as `header["bytes"]` says.

    4 bytes, big-endian: length of the header | header | bytes

Links, login hosts and the objects of a datastore have them alike. Names of files go as Python has them, with surrogate escapes,
which JSON carries. On a link, requests have an `id` and replies `re`.

Login hosts run this text with their own Python, 3.6 or later: standard library alone, and annotations in quotes.
"""

import json
import struct
from typing import Any, Iterator  # noqa: UP035

#: The largest piece of a file in one frame: what an urgent frame may have to wait for.
CHUNK_BYTES = 256 << 10

_LENGTH = struct.Struct(">I")
#: A manifest of some hundred thousand files; what claims to be more is no header.
_MOST_BYTES = 256 << 20

#: Seconds, where a compute target's setting `silence_s` says nothing else.
SILENCE_S = 15.0
#: A busy machine may let a process wait for longer than less would be.
LEAST_SILENCE_S = 1.0


class WireError(ValueError):
    """What came is no frame."""


def frame(header: "dict[str, Any]", data: bytes = b"") -> bytes:
    """The bytes of a frame."""
    text = json.dumps({**header, "bytes": len(data)} if data else header).encode()
    return _LENGTH.pack(len(text)) + text + data


class Frames:
    """Puts frames together from what is read, in whatever pieces it comes."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._header: dict[str, Any] | None = None
        self._wanted = _LENGTH.size

    @property
    def is_torn(self) -> bool:
        """True if a part of a frame has come and not the rest."""
        return bool(self._buffer) or self._header is not None

    def feed(self, data: bytes) -> "Iterator[tuple[dict[str, Any], bytes]]":
        """The frames that `data` completes.

        Raises:
            WireError: it is something else.
        """
        self._buffer += data
        found = self._next()
        while found is not None:
            yield found
            found = self._next()

    def _next(self) -> "tuple[dict[str, Any], bytes] | None":
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
                header = json.loads(text)
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
    """How often an end that has nothing else to say says that it is there, in seconds: one word that is late is no silence."""
    return silence_s / 5
