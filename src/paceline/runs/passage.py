"""The way to a run's supervisor where it has another folder than this program."""

from __future__ import annotations

from typing import Any, Protocol


class Passage(Protocol):
    """The way to a run's supervisor and back, for one command."""

    #: Whether nothing more can come: the command was ended.
    is_over: bool

    def begin(self, request: dict[str, Any]) -> None:
        """Ask for the command: {"argv", "rank", "terminal", "term"}."""

    def tell(self, told: dict[str, Any]) -> None:
        """Pass on one of `in_<n>.json`."""

    def heard(self) -> list[dict[str, Any]]:
        """The messages since the last call, without waiting for any: {"out"}, {"err"}, {"exit"} or {"error"}.

        To be called every second at least: so the other side knows that somebody is here.

        Raises:
            TargetError: the way is closed.
        """

    def close(self) -> None:
        """End the command, if it has not ended, and leave nothing."""
