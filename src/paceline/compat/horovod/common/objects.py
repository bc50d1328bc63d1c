"""Exchange of pickled objects of any type between the ranks, without a framework."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping
from typing import Any

from paceline.collectives.errors import CollectivesError
from paceline.collectives.numbers import Array
from paceline.collectives.rendezvous import run_secret
from paceline.compat.horovod.common import basics, handles
from paceline.compat.horovod.common.handles import allgather_async, broadcast_async_
from paceline.compat.horovod.common.process_sets import ProcessSet, check_root, checked_members, global_process_set
from paceline.system.handshake import RUN_SECRET_VARIABLE, TAG_BYTES, is_tag, tag

_PURPOSE = "object"


def broadcast_object(
    obj: object = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of `root_rank` on every rank.

    Other ranks may pass any object. With cloudpickle installed, the object may also contain functions and lambdas.

    Raises:
        ValueError: `root_rank` is not in the process set, or its object cannot be pickled. Every rank raises this error.
    """
    import numpy as np

    check_root(root_rank, process_set)
    is_root = basics.rank() == root_rank
    data, error = _packed(obj) if is_root else (np.empty(0, np.uint8), None)
    # A negative size means that an error text follows. Pickles and error texts are never empty, so the size is never 0.
    size = np.array([data.size if error is None else -data.size], np.int64)
    handles.synchronize(broadcast_async_(size, root_rank, _part(name, "size"), process_set))
    payload = data if is_root else np.empty(abs(int(size[0])), np.uint8)
    # If the size is negative, also receive the error's text, because every rank raises an error with this text.
    handles.synchronize(broadcast_async_(payload, root_rank, _part(name, "data"), process_set))
    if size[0] < 0:
        raise _refusal({root_rank: payload.tobytes()}) from error
    return obj if is_root else _unpickled(payload.tobytes())


def allgather_object(obj: object, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks in rank order.

    Raises:
        ValueError: A rank's object cannot be pickled. Every rank raises this error.
    """
    import numpy as np

    data, error = _packed(obj)
    size = data.size if error is None else -data.size
    # Start both all-gathers before waiting, which saves a round trip between the ranks.
    sizes = allgather_async(np.array([size], np.int64), _part(name, "sizes"), process_set)
    payload = allgather_async(data, _part(name, "data"), process_set)
    counts, everything = handles.synchronize(sizes).tolist(), handles.synchronize(payload).tobytes()
    ends = itertools.accumulate(abs(count) for count in counts)
    parts = [everything[end - abs(count) : end] for count, end in zip(counts, ends, strict=True)]
    if min(counts) < 0:
        members = zip(checked_members(process_set), counts, parts, strict=True)
        raise _refusal({rank: part for rank, count, part in members if count < 0}) from error
    return [_unpickled(part) for part in parts]


def _part(name: str | None, part: str) -> str | None:
    return None if name is None else f"{name}.{part}"


def _packed(obj: object) -> tuple[Array, Exception | None]:
    """Return (pickle, None), or (error text, error) if the object cannot be pickled."""
    import numpy as np

    error = None
    try:
        data = _signed(_pickled(obj))
    except Exception as failed:
        error, data = failed, _text_of(failed).encode(errors="backslashreplace")
    # Copy the pickle, because its bytes are read-only, and the engine needs a writable array.
    made: Array = np.frombuffer(data, np.uint8).copy()
    return made, error


def _text_of(failed: Exception) -> str:
    # __str__ of a user's exception may raise an exception, too. Even then, the other ranks must not wait for this rank.
    try:
        return f"{type(failed).__name__}: {failed}"
    except Exception:
        return type(failed).__name__


def _pickled(obj: object) -> bytes:
    try:
        import cloudpickle  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        return pickle.dumps(obj)
    return bytes(cloudpickle.dumps(obj))


def _signed(data: bytes) -> bytes:
    key = run_secret()
    return data if key is None else tag(key, _PURPOSE, data) + data


def _unpickled(data: bytes) -> Any:
    """Unpickle an object after checking that a rank of this run signed it.

    A pickle can run any code, and Gloo and MPI do not authenticate senders. So if the ranks share a secret, only
    objects that were signed with this secret are unpickled.
    """
    key = run_secret()
    if key is not None:
        signature, data = data[:TAG_BYTES], data[TAG_BYTES:]
        if not is_tag(signature, key, _PURPOSE, data):
            raise CollectivesError(
                "an object came that is not signed with the run's secret: it is not from a rank of this run, or that rank was "
                f"started in another way. Nothing was made of it. Let one launcher start all ranks ({RUN_SECRET_VARIABLE})."
            )
    return pickle.loads(data)


def _refusal(errors: Mapping[int, bytes]) -> ValueError:
    texts = "; ".join(f"rank {rank}: {text.decode()}" for rank, text in errors.items())
    return ValueError(f"an object can't be pickled, so no rank gets it: {texts}. Send its parts that can be.")
