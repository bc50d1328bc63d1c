"""The policy for Azure features that exist only in Azure (docs/from-azureml.md).

Paceline replaces such a feature if the job still produces the same kind of result. Each replacement adds a note. The
submission shows the note once, and the run's `warnings` contain it. With PACELINE_AZUREML=strict each note is an error.
"""

from __future__ import annotations

import logging
import os

from paceline.compat.azureml.exceptions import UserErrorException

_log = logging.getLogger("paceline.azureml")


class SubmissionNotes:
    """Notes on Azure's features that a submission replaces or ignores."""

    def __init__(self) -> None:
        self._said: dict[str, None] = {}

    def add(self, text: str) -> None:
        """Add a note unless the submission already has this note.

        Raises:
            UserErrorException: PACELINE_AZUREML is "strict", so each note is an error.
        """
        if is_strict():
            raise UserErrorException(f"{text} PACELINE_AZUREML=strict forbids replacements; unset it to continue.")
        self._said.setdefault(text)

    def all(self) -> tuple[str, ...]:
        return tuple(self._said)

    def show(self) -> tuple[str, ...]:
        """Log the notes that this program has not logged yet, and return them."""
        found = tuple(text for text in self._said if text not in _shown)
        for text in found:
            _shown.add(text)
            _log.warning("%s", text)
        return found


_shown: set[str] = set()


def is_strict() -> bool:
    """Return whether PACELINE_AZUREML forbids replacements of Azure's features.

    Raises:
        UserErrorException: PACELINE_AZUREML is neither empty, "lenient" nor "strict".
    """
    value = os.environ.get("PACELINE_AZUREML", "")
    if value not in ("", "lenient", "strict"):
        raise UserErrorException(f"PACELINE_AZUREML={value!r} must be 'strict', 'lenient' or unset.")
    return value == "strict"
