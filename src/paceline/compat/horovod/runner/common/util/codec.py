"""Objects as text: pickled by cloudpickle, in base64. A pickle runs code: read only what this user's own processes wrote."""

from __future__ import annotations

import base64
import pickle
from typing import Any


def loads_base64(encoded: str | bytes) -> Any:
    """The object. Needs cloudpickle where the object does."""
    return pickle.loads(base64.b64decode(encoded))


def dumps_base64(obj: Any, to_ascii: bool = True) -> str | bytes:
    """The object as base64: text, or with `to_ascii=False` bytes. Needs cloudpickle (`pip install 'paceline[mpi]'`)."""
    # The standard library's pickle knows a function by its name alone, so not a lambda, nor one of the caller's main
    # program.
    import cloudpickle

    encoded = base64.b64encode(cloudpickle.dumps(obj))
    return encoded.decode("ascii") if to_ascii else encoded
