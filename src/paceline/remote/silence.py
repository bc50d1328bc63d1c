"""After how long without a word each end of a link takes the other for lost: a node its supervisor, a supervisor its node."""

from __future__ import annotations

#: Seconds, where a compute target's setting `silence_s` says nothing else.
SILENCE_S = 15.0
#: A busy machine may let a process wait for longer than less would be.
LEAST_SILENCE_S = 1.0


def ping_s(silence_s: float) -> float:
    """How often an end that has nothing else to say says that it is there, in seconds: one word that is late is no silence."""
    return silence_s / 5
