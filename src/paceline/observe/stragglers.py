"""Measure how ranks spend their time, and find stragglers: pure functions of step counts.

    window      the time between two samples, with each rank's steps, and seconds of waiting for data and other ranks
    own time    a rank's seconds in a window, except waits for other ranks: in training, all wait for the slowest
    straggler   ranks whose own time is 25 % longer than the other ranks' in nearly every window, while the other ranks wait

Windows in which a rank made no step are ignored. Examples are the start, a checkpoint, an evaluation on rank 0 alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median, median_low
from typing import Any

from paceline.observe.wait_graph import ranks_words

#: A rank is slow if its time, without its waits for others, is at least this many times the median of all ranks.
FACTOR = 1.25
#: Minimum number of time windows to judge by; minimum share of these windows in which a straggler must be slow.
WINDOWS, STEADY = 6, 0.8
#: Ranks count as waiting for a straggler if they wait for at least this share of their time. Messages cost less.
WAITS = 0.1
#: At a run's end, report stragglers that cost other ranks at least this many seconds and this share of their time.
LOST_S, LOST = 30.0, 0.1
#: If ranks hardly wait for each other, a straggler's share of waits for data is this much above the median.
DATA_MORE = 0.2


@dataclass(frozen=True)
class Counted:
    """A rank's steps, waiting seconds and total seconds between two samples."""

    passed_s: float
    steps: float
    data_s: float
    others_s: float

    def __add__(self, other: Counted) -> Counted:
        return Counted(
            self.passed_s + other.passed_s,
            self.steps + other.steps,
            self.data_s + other.data_s,
            self.others_s + other.others_s,
        )


@dataclass(frozen=True, kw_only=True)
class RankPace:
    """The time that one rank spent in training, by activity.

    step_s: Seconds per step.
    compute, data, others: Shares of the time, 0 to 1, in which the rank computed, waited for the next batch, and
        waited for other ranks.
    """

    rank: int
    node: str
    steps: int
    step_s: float
    compute: float
    data: float
    others: float


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """Ranks that make the other ranks wait.

    factor: The stragglers' time per step, divided by the other ranks'. Waits for other ranks do not count.
    own_s, others_s: The two times per step that `factor` compares, in seconds.
    lost_s: Seconds that the other ranks have waited so far.
    why: "data" if the straggler waits for batches, else "compute".
    place, place_share: The stragglers' most frequent line of code, such as "data.py:41, `load`" (None if unknown), and
        the share of their time in this line.
    since_utc: The time at which Paceline found these ranks slow. None if they are no longer slow.
    """

    ranks: tuple[int, ...]
    node: str
    factor: float
    own_s: float
    others_s: float
    lost_s: float
    why: str
    place: str | None = None
    place_share: float = 0.0
    since_utc: str | None = None

    def text(self, *, is_over: bool = False) -> str:
        """Return a sentence on which ranks are (`is_over`: were) slow, how much, and where."""
        one = len(self.ranks) == 1
        be = ("was" if one else "were") if is_over else ("is" if one else "are")
        where = f" on {self.node}" if self.node else ""
        takes = ("took" if is_over else "takes" if one else "take"), ("took" if is_over else "take")
        text = (
            f"{ranks_words(self.ranks).capitalize()}{where} {be} {self.factor:.1f} times as slow as the others: "
            f"{'it' if one else 'each'} {takes[0]} {seconds_text(self.own_s)} a step of its own, "
            f"where they {takes[1]} {seconds_text(self.others_s)} and then {'waited' if is_over else 'wait'}"
        )
        if self.place:
            return f"{text}. {100 * self.place_share:.0f} % of {'its' if one else 'their'} time in {self.place}."
        return f"{text}. {'Most of it is waiting for data.' if self.why == 'data' else ''}".rstrip()


@dataclass(frozen=True, kw_only=True)
class RunPace:
    """The time that the ranks of an attempt spent in training, and the straggler.

    straggler: None if no rank is clearly slower. seconds: How long the ranks were observed.
    """

    ranks: Mapping[int, RankPace] = field(default_factory=dict)
    straggler: Straggler | None = None
    seconds: float = 0.0
    is_over: bool = False

    @property
    def end_text(self) -> str | None:
        """Return a sentence, for the run's end, on a costly straggler, or None."""
        found = self.straggler
        if found is None or found.lost_s < max(LOST_S, LOST * self.seconds):
            return None
        lost = f"{found.lost_s / 60:.0f} min" if found.lost_s >= 120 else f"{found.lost_s:.0f} s"
        return f"{found.text(is_over=True)} That took {lost} in all."

    def __str__(self) -> str:
        return "\n".join(lines(self))

    def to_json(self) -> dict[str, object]:
        """Return plain JSON values."""
        return {
            "ranks": {str(rank): asdict(one) for rank, one in self.ranks.items()},
            "straggler": None if self.straggler is None else {**asdict(self.straggler), "text": self.straggler.text()},
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, is_over: bool = False) -> RunPace:
        told = data.get("straggler")
        if told is not None:
            told = {**{key: value for key, value in told.items() if key != "text"}, "ranks": tuple(told["ranks"])}
        return cls(
            ranks={int(rank): RankPace(**one) for rank, one in data.get("ranks", {}).items()},
            straggler=None if told is None else Straggler(**told),
            seconds=float(data.get("seconds", 0.0)),
            is_over=is_over,
        )


def lines(pace: RunPace) -> list[str]:
    """Return lines that say how ranks spent their time, and which ranks are stragglers."""
    rows: dict[str, list[int]] = {}
    for rank, one in sorted(pace.ranks.items()):
        shares = (("computing", one.compute), ("waiting for data", one.data), ("waiting for others", one.others))
        text = ", ".join(f"{100 * share:.0f} % {what}" for what, share in shares)
        rows.setdefault(f"{seconds_text(one.step_s)} a step: {text}", []).append(rank)
    found = [f"{ranks_words(ranks).capitalize()}: {text}" for text, ranks in rows.items()]
    if pace.straggler is not None:
        found.append(pace.straggler.text(is_over=pace.is_over))
    return found


def pace_of(windows: Sequence[Mapping[int, Counted]], nodes: Mapping[int, str], *, recent: int = 0) -> RunPace:
    """Return how the ranks spent their time over all windows, and the straggler.

    windows: For each period between two samples, oldest first: rank -> its steps and seconds.
    nodes: Rank -> its node's name.
    recent: How many of the newest windows determine the straggler; 0 for all.
    """
    trained = [window for window in windows if is_training(window)]
    if not trained:
        return RunPace()
    total = _summed(trained)
    ranks = {
        rank: RankPace(
            rank=rank,
            node=nodes.get(rank, ""),
            steps=round(one.steps),
            step_s=round(one.passed_s / one.steps, 6),
            compute=round(max(0.0, 1 - (one.data_s + one.others_s) / one.passed_s), 4),
            data=round(min(1.0, one.data_s / one.passed_s), 4),
            others=round(min(1.0, one.others_s / one.passed_s), 4),
        )
        for rank, one in sorted(total.items())
    }
    judged = trained[-recent:] if recent else trained
    return RunPace(
        ranks=ranks,
        straggler=straggler_of(judged, nodes),
        seconds=round(max(one.passed_s for one in total.values()), 1),
    )


def straggler_of(windows: Sequence[Mapping[int, Counted]], nodes: Mapping[int, str]) -> Straggler | None:
    """Return the ranks that make the other ranks wait, or None.

    windows: For each period between two samples: rank -> its steps and seconds.
    """
    if len(windows) < WINDOWS or len(windows[0]) < 2:
        return None
    total = _summed(windows)
    if all(one.others_s < WAITS * one.passed_s for one in total.values()):
        return _by_data(windows, total, nodes)
    own = _own(total)
    slow = _slow(own)
    others = [rank for rank in total if rank not in slow]
    if (
        not slow
        or 2 * len(slow) > len(total)
        or median(total[rank].others_s / total[rank].passed_s for rank in others) < WAITS
    ):
        return None
    steady = sum(slow <= _slow(_own(window)) for window in windows)
    if steady < STEADY * len(windows):
        return None
    steps = max(1.0, median(one.steps for one in total.values()))
    theirs, mine = median(own[rank] for rank in others), median(own[rank] for rank in slow)
    more = median(total[rank].data_s for rank in slow) - median(total[rank].data_s for rank in others)
    return _straggler(slow, nodes, mine / steps, theirs / steps, mine - theirs, more > (mine - theirs) / 2)


def is_training(window: Mapping[int, Counted]) -> bool:
    """Return whether every rank made a training step between two samples."""
    return bool(window) and all(one.steps >= 1 and one.passed_s > 0 for one in window.values())


def seconds_text(seconds: float) -> str:
    """Return seconds as text, such as "0.43 s" or "12 ms"."""
    if seconds < 0.1:
        return f"{1e3 * seconds:.2g} ms" if seconds < 0.01 else f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"


def _by_data(
    windows: Sequence[Mapping[int, Counted]], total: Mapping[int, Counted], nodes: Mapping[int, str]
) -> Straggler | None:
    def shares(window: Mapping[int, Counted]) -> dict[int, float]:
        return {rank: one.data_s / one.passed_s for rank, one in window.items()}

    def slow_of(found: Mapping[int, float]) -> set[int]:
        return {rank for rank, share in found.items() if share > median_low(found.values()) + DATA_MORE}

    found = shares(total)
    slow = slow_of(found)
    if (
        not slow
        or 2 * len(slow) > len(total)
        or len({round(one.steps) for one in total.values()}) > 2
        or sum(slow <= slow_of(shares(window)) for window in windows) < STEADY * len(windows)
    ):
        return None
    steps = max(1.0, median(one.steps for one in total.values()))
    passed = median(one.passed_s for one in total.values())
    more = (median(found[rank] for rank in slow) - median_low(found.values())) * passed
    return _straggler(slow, nodes, passed / steps, (passed - more) / steps, more, True)


def _straggler(
    slow: set[int], nodes: Mapping[int, str], own_s: float, others_s: float, lost_s: float, is_data: bool
) -> Straggler:
    # Leave out node names if the run has only one node.
    names = {nodes.get(rank, "") for rank in slow} if len(set(nodes.values())) > 1 else {""}
    return Straggler(
        ranks=tuple(sorted(slow)),
        node=", ".join(sorted(names)) if len(names) < 4 else f"{len(names)} nodes",
        factor=round(own_s / max(others_s, 1e-9), 2),
        own_s=round(own_s, 6),
        others_s=round(others_s, 6),
        lost_s=round(lost_s, 1),
        why="data" if is_data else "compute",
    )


def _own(window: Mapping[int, Counted]) -> dict[int, float]:
    """Return each rank's seconds without waits for other ranks, scaled to equal step counts."""
    steps = [one.steps for one in window.values()]
    if max(steps) - min(steps) <= 1:
        return {rank: max(0.0, one.passed_s - one.others_s) for rank, one in window.items()}
    mean = sum(steps) / len(steps)
    return {rank: max(0.0, one.passed_s - one.others_s) * mean / one.steps for rank, one in window.items()}


def _slow(own: Mapping[int, float]) -> set[int]:
    least = max(median_low(own.values()), 1e-9)
    return {rank for rank, seconds in own.items() if seconds >= FACTOR * least}


def _summed(windows: Sequence[Mapping[int, Counted]]) -> dict[int, Counted]:
    total: dict[int, Counted] = {}
    for window in windows:
        for rank, one in window.items():
            total[rank] = total[rank] + one if rank in total else one
    return total
