"""Objects as base64 text, pickled by cloudpickle. A pickle runs code: read only those of this user's own processes."""

from __future__ import annotations

import base64
import pickle
from typing import Any


def loads_base64(encoded: str | bytes) -> Any:
    """Return the object. Needs cloudpickle if the object does."""
    return pickle.loads(base64.b64decode(encoded))


def dumps_base64(obj: Any, to_ascii: bool = True) -> str | bytes:
    """Encode the object as text, or bytes with `to_ascii=False`. Needs cloudpickle (`pip install 'paceline[mpi]'`)."""
    # The standard library's pickle knows a function by its name alone, so not a lambda, nor one of the caller's main
    # program.
    import cloudpickle

    encoded = base64.b64encode(cloudpickle.dumps(obj))
    return encoded.decode("ascii") if to_ascii else encoded
