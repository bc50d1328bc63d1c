"""Which Python scripts get on nodes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.remote.link.link import Link


def script_python(given: str | None, submitter: str | None, links: Sequence[Link]) -> str | None:
    """The interpreter of scripts that name none: the one that the target names; else the submitting program's, where all
    nodes have it; None for the agents' own. submitter: None where it is not to be looked for.
    """
    if given is not None or submitter is None:
        return given
    return submitter if all(link.exists(submitter) for link in links) else None
