"""What trials have failed with, and what most of them have in common."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.runs import store
from paceline.runs.failure import FailureReport, last_words
from paceline.runs.folder import RunFolder
from paceline.sweeps.sweep_state import SweepState
from paceline.sweeps.trial import Trial

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|[-+]?\d+(\.\d+)?([eE][-+]?\d+)?")


@dataclass(frozen=True, kw_only=True)
class Cause:
    """text: one sentence or line. see: the command that shows more."""

    text: str = "?"
    see: str | None = None


def cause(folder: RunFolder) -> Cause:
    """What a run has failed with.

    Raises:
        RunNotFoundError: the run was removed.
    """
    report = store.stored(folder).failure
    return Cause() if report is None else Cause(text=_text(report), see=report.see)


def common(sweep: SweepState, failed: Sequence[Trial]) -> Cause:
    """ "7 of 8 failed with the same error: ..."; numbers may differ, such as hyperparameters, addresses and sizes."""
    alike: dict[str, list[Cause]] = {}
    for trial in failed:
        # A trial's folder may have been removed by hand; the others still tell what they died of.
        with contextlib.suppress(PacelineError):
            found = cause(sweep.folder_of(trial.number))
            alike.setdefault(_NUMBER.sub("0", found.text), []).append(found)
    most = max(alike.values(), key=len, default=[Cause()])
    if len(most) == 1:
        return Cause(text=f"The first error: {most[0].text}", see=most[0].see)
    but = "" if len({found.text for found in most}) == 1 else ", but for its numbers"
    return Cause(text=f"{len(most)} of {len(failed)} failed with the same error{but}: {most[0].text}", see=most[0].see)


def _text(report: FailureReport) -> str:
    if report.exception:
        return report.exception.strip()
    last = last_words(report.last_lines)
    # A script that leaves with an exit code has said why before, as argparse does.
    return f"{report.message.strip()} Its last line: {last}" if last and report.cause == "exception" else report.message
