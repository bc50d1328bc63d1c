"""What a model process asks of whatever it serves: a scoring script, a typed function, or a model as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from paceline.serving.wire import ModelCall, Reply


class Servable(Protocol):
    """kind: what it is, for the log. wants_head: it looks at the method, the query or the headers of every request.
    is_batched: `answer` may be given several requests.
    """

    kind: str
    wants_head: bool
    is_batched: bool

    def documents(self) -> dict[str, Any]:
        """What the front answers by itself: "swagger2", "swagger3", "openapi", "metadata" (of the inference protocol)."""
        ...

    def answer(self, calls: Sequence[ModelCall]) -> list[Reply]:
        """An answer to each; never raises for what a request holds or the user's code does."""
        ...
