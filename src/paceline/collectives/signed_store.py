"""Values that ranks give each other in torch's key-value store: JSON, signed with the run's secret.

The store lets in whoever reaches its port, shows its keys, and lets any value be replaced. So each value goes with a tag
over its key and itself: one that somebody else has written, or that was taken from another key, is refused. Without a
secret (torchrun gives none) values are JSON all the same: they can be wrong then, but do nothing.
"""

from __future__ import annotations

import json
from typing import Any

from paceline.collectives.errors import CollectivesError
from paceline.collectives.secret import TAG_BYTES, VARIABLE, is_tag, tag

#: Before the tag of a signed value; no JSON begins with it.
_SIGNED = b"\x01signed "
_HEAD_BYTES = len(_SIGNED) + TAG_BYTES


class SignedStore:
    """One part of a store.

    store: torch's, where keys are as given here. prefix: what stands before them in the whole store. where: the store's
    address and port, for messages. key: the run's secret; None signs nothing.
    """

    def __init__(self, store: Any, prefix: str, where: str, key: bytes | None) -> None:
        self._store, self._prefix, self._where, self._key = store, prefix, where, key

    def set(self, name: str, value: Any) -> None:
        """Say a value, which JSON has to know, under this name."""
        self.set_bytes(name, json.dumps(value).encode())

    def get(self, name: str) -> Any:
        """The value that was said under this name; waits until it is. Tuples come back as lists.

        Raises:
            CollectivesError: a value that no rank of this run has signed, or that is no JSON. Nothing is made of it.
        """
        data = self.get_bytes(name)
        try:
            return json.loads(data)
        except ValueError:
            raise CollectivesError(f"{self._told(name)} is no JSON: {data[:40]!r}. {self._advice()}") from None

    def has(self, name: str) -> bool:
        """True if something was said under this name."""
        return bool(self._store.check([name]))

    def set_bytes(self, name: str, data: bytes) -> None:
        """Say bytes of any kind under this name."""
        if self._key is not None:
            data = _SIGNED + tag(self._key, self._purpose(name), data) + data
        self._store.set(name, data)

    def get_bytes(self, name: str) -> bytes:
        """The bytes that were said under this name; waits for them, and raises what `get` does."""
        data = bytes(self._store.get(name))
        is_signed = data.startswith(_SIGNED) and len(data) >= _HEAD_BYTES
        if self._key is None:
            if is_signed:
                raise CollectivesError(
                    f"{self._told(name)} is signed, but this rank was given no {VARIABLE}: it was started in another way "
                    "than the one that said it. Let one launcher start all ranks, with the same environment."
                )
            return data
        if not is_signed:
            raise CollectivesError(f"{self._told(name)} is not signed with the run's secret. {self._advice()}")
        found, content = data[len(_SIGNED) : _HEAD_BYTES], data[_HEAD_BYTES:]
        if not is_tag(found, self._key, self._purpose(name), content):
            raise CollectivesError(f"{self._told(name)} is signed with another secret than the run's. {self._advice()}")
        return content

    def for_torch(self) -> Any:
        """This part as one of torch's own stores, for a process group over Gloo, which looks up there where the other ranks
        listen. Whoever gives it away keeps it: torch keeps only what is its own of it.
        """
        import torch.distributed as dist

        base: Any = getattr(dist, "Store")  # noqa: B009 - torch's stubs don't have it

        class Signed(base):  # type: ignore[misc]
            def __init__(self, said: SignedStore) -> None:
                super().__init__()
                self._said = said

            def set(self, name: str, value: Any) -> None:
                self._said.set_bytes(name, value.encode() if isinstance(value, str) else bytes(value))

            def get(self, name: str) -> bytes:
                return self._said.get_bytes(name)

            def wait(self, names: Any, timeout: Any = None) -> None:
                self._said._store.wait(names, *(() if timeout is None else (timeout,)))

            def check(self, names: Any) -> bool:
                return bool(self._said._store.check(names))

        return Signed(self)

    def _purpose(self, name: str) -> str:
        return f"store {self._prefix}/{name}"

    def _told(self, name: str) -> str:
        return f"the value {f'{self._prefix}/{name}'!r} in the store at {self._where}"

    def _advice(self) -> str:
        return (
            "Somebody else has written it, or a rank that was started in another way; nothing of it was used. Let one "
            f"launcher start all ranks, and see who reaches the port ({self._where})."
        )
