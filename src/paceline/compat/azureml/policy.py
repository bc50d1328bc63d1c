"""What of a job for Azure can't be had on one's own machines, and what is done instead (docs/from-azureml.md).

The job goes on with what is here where the result is the same in kind; each such change is a sentence, shown once at submission
and kept with the run (`warnings` in its record). With PACELINE_AZUREML=strict each is an error.
"""

from __future__ import annotations

import logging
import os

from paceline.compat.azureml.exceptions import UserErrorException

_log = logging.getLogger("paceline.azureml")


class SubmissionNotes:
    """The sentences of one submission."""

    def __init__(self) -> None:
        self._said: dict[str, None] = {}

    def add(self, text: str) -> None:
        """Note a change, once.

        Raises:
            UserErrorException: PACELINE_AZUREML=strict.
        """
        if is_strict():
            raise UserErrorException(f"{text} PACELINE_AZUREML=strict takes no replacement; unset it to go on.")
        self._said.setdefault(text)

    def all(self) -> tuple[str, ...]:
        """Each sentence."""
        return tuple(self._said)

    def show(self) -> tuple[str, ...]:
        """Log the sentences that this program has not logged yet; these."""
        found = tuple(text for text in self._said if text not in _shown)
        for text in found:
            _shown.add(text)
            _log.warning("%s", text)
        return found


_shown: set[str] = set()


def is_strict() -> bool:
    """Whether nothing may be replaced.

    Raises:
        UserErrorException: PACELINE_AZUREML is neither empty, "lenient" nor "strict".
    """
    value = os.environ.get("PACELINE_AZUREML", "")
    if value not in ("", "lenient", "strict"):
        raise UserErrorException(f"PACELINE_AZUREML={value!r}: write 'strict', or unset it.")
    return value == "strict"
