"""Explanations of failed trials, and warnings about metrics that look wrong, such as NaN."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.runs import states, store
from paceline.runs.failure import FailureReport, last_words
from paceline.runs.folder import RunFolder
from paceline.sweeps.curves import CurveReader
from paceline.sweeps.sweep_state import SweepState
from paceline.sweeps.trial import Goal, Trial, best

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|[-+]?\d+(\.\d+)?([eE][-+]?\d+)?")

#: Words in a sweep's warnings by which each kind of warning is recognized, so that it is logged once.
_WITHOUT, _FINITE, _RANKS, _DIRECTION = (
    "without a value of",
    "no finite number",
    "with different values",
    "from its first value",
)
#: Warn that the sweep's goal may be wrong if at least this many trials got worse, over at least this many values.
_TRIALS, _VALUES = 3, 3
_LOOKED_AT = 50


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The cause of a trial's failure, as text for people.

    Attributes:
        text: The cause, as one sentence or line.
        see: Command that shows details.
    """

    text: str = "?"
    see: str | None = None


def cause(folder: RunFolder) -> Cause:
    """Return why a run failed.

    Raises:
        RunNotFoundError: The run was removed.
    """
    report = store.stored(folder).failure
    return Cause() if report is None else Cause(text=_text(report), see=report.see)


def common(sweep: SweepState, failed: Sequence[Trial]) -> Cause:
    """Return the most frequent error of failed trials.

    Errors that differ only in numbers, such as sizes, count as one error. If all errors differ, return the first.
    """
    alike: dict[str, list[Cause]] = {}
    for trial in failed:
        # Skip a trial whose folder a user has removed.
        with contextlib.suppress(PacelineError):
            reason = cause(sweep.folder_of(trial.number))
            alike.setdefault(_NUMBER.sub("0", reason.text), []).append(reason)
    most = max(alike.values(), key=len, default=[Cause()])
    if len(most) == 1:
        return Cause(text=f"The first error: {most[0].text}", see=most[0].see)
    but = "" if len({reason.text for reason in most}) == 1 else ", but for its numbers"
    return Cause(text=f"{len(most)} of {len(failed)} failed with the same error{but}: {most[0].text}", see=most[0].see)


def _text(report: FailureReport) -> str:
    if report.exception:
        return report.exception.strip()
    last = last_words(report.last_lines)
    # Add the log's last line if the script ended itself: a script that exits with a code prints its reason, as argparse does.
    return f"{report.message.strip()} Its last line: {last}" if last and report.cause == "exception" else report.message


def warn_of(sweep: SweepState, trial: Trial) -> None:
    """Warn once per kind of problem about a trial's metrics that look wrong."""
    for kind, text in _remarks(sweep, trial):
        if not any(kind in warning for warning in sweep.record.warnings):
            sweep.warn(text)


def _remarks(sweep: SweepState, trial: Trial) -> Iterator[tuple[str, str]]:
    if trial.status == states.COMPLETED and not all(trial.curves):
        yield _WITHOUT, sweep.no_metric(trial)
    for metric, goal, curve in zip(sweep.spec.metrics, sweep.spec.goals, trial.curves, strict=False):
        odd = [value for value in curve if not math.isfinite(value)]
        if odd:
            values = f"of {metric!r} that trial {trial.number} has logged"
            what = _not_finite(len(odd), len(curve), values)
            yield _FINITE, f"{what} ({_shown(odd)}): what is {_FINITE} counts for nothing."
        if sweep.job.world_size > 1 and (text := _of_ranks(sweep, trial, metric)):
            yield _RANKS, text
        if text := _of_direction(sweep, metric, goal):
            yield _DIRECTION, text


def _not_finite(count: int, total: int, values: str) -> str:
    if total == 1:
        return f"the one value {values} is not a finite number"
    which = f"all {total}" if count == total else f"{count} of the {total}"
    return f"{which} values {values} {'is not a finite number' if count == 1 else 'are not finite numbers'}"


def _shown(values: Sequence[float]) -> str:
    return ", ".join(dict.fromkeys(f"{value:g}" for value in values))


def _of_ranks(sweep: SweepState, trial: Trial, metric: str) -> str:
    reader = CurveReader(sweep.folder_of(trial.number).metrics, metric)
    reader.look()
    ranks = reader.by_rank
    # Don't warn if all ranks log the same values.
    if len(set(ranks.values())) < 2:
        return ""
    return f"{metric!r} is logged by {len(ranks)} ranks of trial {trial.number} {_RANKS}: those of rank {min(ranks)} count."


def _of_direction(sweep: SweepState, metric: str, goal: Goal) -> str:
    place = sweep.spec.metrics.index(metric)
    # If the goal has the wrong direction, the curves of the sweep's first trials get worse when judged by this goal.
    ended = [trial.curves[place] for trial in sweep.trials[:_LOOKED_AT] if trial.is_over and place < len(trial.curves)]
    curves = [[value for value in curve if math.isfinite(value)] for curve in ended]
    long = [curve for curve in curves if len(curve) >= _VALUES]
    count = len(long)
    if count < _TRIALS or not all(curve[-1] != curve[0] == best(curve, goal) for curve in long):
        return ""
    way, other = ("falls", "minimize") if goal == "maximize" else ("rises", "maximize")
    return (
        f"in each of the {count} trials that have ended, {metric!r} {way} {_DIRECTION} on, and the sweep is to {goal} it: "
        f"if that is the wrong way round, give goal={other!r} (--{other})."
    )
