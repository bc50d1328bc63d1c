"""The engine's messages as bytes: numbers, text, bytes, tuples, and what it has of its own. Nothing else is ever made.

They are pickles, for speed: a message of a usual step is a tuple of numbers, which JSON takes several times as long for, and
JSON knows no bytes. What pickles can do beyond that, call any function there is, is refused: whoever could send one would run
what he likes here (https://docs.python.org/3/library/pickle.html#restricting-globals). So a message that was forged can be
wrong, no more.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from paceline.collectives.errors import CollectivesError
from paceline.collectives.request import Agreement, Request

_KNOWN: dict[tuple[str, str], type] = {(kind.__module__, kind.__qualname__): kind for kind in (Request, Agreement)}


def packed(value: Any) -> bytes:
    """The bytes of a value of these types."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unpacked(data: bytes | bytearray) -> Any:
    """The value that `packed` made the bytes of.

    Raises:
        CollectivesError: the bytes are none of a message.
    """
    try:
        return _Reader(io.BytesIO(data)).load()
    except CollectivesError:
        raise
    except Exception as error:
        raise CollectivesError(
            f"what came is no message of a rank ({type(error).__name__}: {error}). Does something else use the ranks' ports?"
        ) from None


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type:
        found = _KNOWN.get((module, name))
        if found is None:
            raise CollectivesError(
                f"what came names {module}.{name}, which no message of a rank does: it is not from one, and was not taken."
            )
        return found
