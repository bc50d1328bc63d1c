"""Clocks of the nodes, compared with each other and with this machine's.

Logs and metrics of several nodes are ordered by time, and a wrong clock makes certificates and tokens invalid.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.doctor.examination import FAIL, OK, WARN, Examination, Finding, NoAnswerError, Patient

_WARN_S = 1.0
_FAIL_S = 30.0
_SAMPLES = 3
_QUESTION_S = 20.0
_ADVICE = "Let the node take its time from the network: `timedatectl set-ntp true`, or start chronyd or ntpd."


@dataclass(frozen=True)
class Offset:
    """The lead of a node's clock over this machine's, within `error_s`."""

    seconds: float
    error_s: float

    @property
    def surely_s(self) -> float:
        """Return the lower bound of the difference."""
        return max(0.0, abs(self.seconds) - self.error_s)


def check_clocks(examination: Examination) -> Iterator[Finding]:
    """Return a finding for each node, and one for the nodes among each other."""
    found, failed = examination.ask_all("clock", _offset, _SAMPLES * _QUESTION_S)
    yield from failed
    for name, offset in found.items():
        yield Finding(
            check="clock",
            node=name,
            level=_level(offset.surely_s),
            seen=_apart(offset),
            advice=_ADVICE if offset.surely_s > _WARN_S else "",
        )
    if len(found) > 1:
        yield _between(found)


def _between(found: dict[str, Offset]) -> Finding:
    first = min(found, key=lambda name: found[name].seconds)
    last = max(found, key=lambda name: found[name].seconds)
    apart = Offset(found[last].seconds - found[first].seconds, found[last].error_s + found[first].error_s)
    level = _level(apart.surely_s)
    return Finding(
        check="clock",
        level=level,
        seen=f"{_seconds(apart.seconds)} at most between two nodes" + (f" ({first} and {last})" if level != OK else ""),
        advice=_ADVICE if level != OK else "",
    )


def _offset(patient: Patient) -> Offset:
    """Return the best of some samples: that with the shortest round trip."""
    samples = []
    for _ in range(_SAMPLES):
        asked = time.time()
        done = patient.run([patient.python, "-S", "-c", "import time; print(time.time())"], timeout_s=_QUESTION_S)
        answered = time.time()
        try:
            theirs = float(done.stdout)
        except ValueError:
            raise NoAnswerError(f"its Python told no time: {done.stderr.decode(errors='replace')[-200:]}") from None
        # As NTP does: assume the node's time is that of the middle of the round trip.
        samples.append(Offset(theirs - (asked + answered) / 2, (answered - asked) / 2))
    # The shortest round trip has the least delay.
    return min(samples, key=lambda offset: offset.error_s)


def _apart(offset: Offset) -> str:
    if offset.surely_s == 0:
        return f"that of this machine, as far as can be told within {_seconds(offset.error_s)}"
    return f"{_seconds(offset.seconds)} {'ahead of' if offset.seconds > 0 else 'behind'} this machine's"


def _level(surely_s: float) -> str:
    return FAIL if surely_s > _FAIL_S else WARN if surely_s > _WARN_S else OK


def _seconds(seconds: float) -> str:
    return f"{abs(seconds) * 1e3:.0f} ms" if abs(seconds) < 1 else f"{abs(seconds):.1f} s"
