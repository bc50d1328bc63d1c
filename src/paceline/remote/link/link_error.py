"""The error that a node can't be reached, or is lost."""

from __future__ import annotations

from paceline.errors import EngineError


class LinkError(EngineError):
    """A node's agent could not be started, or does not answer any more.

    stderr: what the program that was to reach it has said. exit_code: how that program ended, None where it has not.
    """

    def __init__(self, message: str, stderr: str = "", exit_code: int | None = None) -> None:
        super().__init__(message)
        self.stderr = stderr
        self.exit_code = exit_code
