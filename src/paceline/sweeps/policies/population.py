"""Population-based training: the worst trials become copies of the best.

    generation   1     2     3          a generation is a run of `interval` values for each trial;
    trial 0      0.5 - 0.7 - 0.8        when all have ended, the worst continue from a checkpoint
    trial 1      0.6 - 0.8 - 0.9        of one of the best, with slightly changed hyperparameters,
    trial 2      0.2 -'0.7 - 0.8        and the others from their own

Jaderberg et al., Population Based Training of Neural Networks, 2017; a run for each generation as in Li et al., A Generalized
Framework for Population Based Training, KDD 2019.

A numeric hyperparameter is multiplied by a factor; if its range includes negative numbers, it is shifted instead. A
choice between numbers changes to a neighbouring number, and any other choice to another option at random.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from paceline.errors import SweepError
from paceline.runs import states
from paceline.sweeps.expressions import Choice, Fixed, Integers, Normal, Raw, Uniform, is_number
from paceline.sweeps.policies.pausing import Judgement, check_budget
from paceline.sweeps.policies.policy import NamedPolicy, check_whole
from paceline.sweeps.samplers.sampler import seed_of
from paceline.sweeps.space import Dimension, Space
from paceline.sweeps.trial import Goal, Next, Trial, cost


@dataclass(frozen=True, kw_only=True)
class PopulationBasedTraining(NamedPolicy):
    """A policy that copies the best trials over the worst.

    The script must resume from `PACELINE_CHECKPOINT_DIR`, with the hyperparameters that it gets.

    Args:
        interval: Number of values that each trial logs between two replacements of the worst trials.
        last: Number of values that the script logs until it ends.
        quantile: Share of trials to replace and of trials to copy, up to 0.5. Trials are ranked by their last values.
        factors: Numbers, of which one at random multiplies each hyperparameter of a copy.
        resample: Probability that a hyperparameter is drawn from the space instead.
        mutate: Names of hyperparameters that change; None for all. Other hyperparameters, such as a number of layers, stay.
        budget: The script's argument, such as "--epochs", that sets how many values the script logs in all until it
            ends. None sends SIGTERM to each run of a trial after `interval` values.

    Raises:
        SweepError: A number is out of range.

    Examples:
        >>> stop = pl.PopulationBasedTraining(interval=2, last=10)
        >>> sweep = pl.Sweep(pl.Estimator(entry_script="train.py"), {"--lr": pl.uniform(0, 1)}, metric="loss", stop=stop)
    """

    NAME: ClassVar[str] = "pbt"

    interval: int
    last: int
    quantile: float = 0.25
    factors: Sequence[float] = (0.8, 1.2)
    resample: float = 0.25
    mutate: Sequence[str] | str | None = None
    budget: str | None = None

    def __post_init__(self) -> None:
        check_whole("PBT", "interval", self.interval, at_least=1)
        check_whole("PBT", "last", self.last, at_least=self.interval)
        if not is_number(self.quantile) or not 0 < self.quantile <= 0.5:
            raise SweepError(f"PBT: quantile={self.quantile!r} is not a share above 0 and up to 0.5.")
        if not is_number(self.resample) or not 0 <= self.resample <= 1:
            raise SweepError(f"PBT: resample={self.resample!r} is not a probability from 0 to 1.")
        if (
            not isinstance(self.factors, (list, tuple))
            or not self.factors
            or not all(is_number(factor) and factor > 0 for factor in self.factors)
        ):
            raise SweepError(f"PBT: factors={self.factors!r} are no numbers above 0. Give such as [0.8, 1.2].")
        if self.mutate is not None and (not self.mutate or not all(isinstance(name, str) for name in self.mutate)):
            raise SweepError(f"PBT: mutate={self.mutate!r} are no names of hyperparameters. Give such as ['lr'].")
        check_budget("PBT", self.budget, self.last)

    @property
    def pauses(self) -> bool:
        """True, because trials wait at the end of each generation."""
        return True

    def stops(self, trials: Sequence[Trial], goal: Goal) -> Mapping[int, str]:
        """Return {}, because the worst trials are replaced instead of stopped."""
        return {}

    def judge(self, trials: Sequence[Trial], goal: Goal) -> Mapping[int, Judgement]:
        """Return {trial number: decision to pause} at the end of a generation; {} with `budget`."""
        judgements: dict[int, Judgement] = {}
        for trial in trials:
            end = self._end(len(trial.legs))
            # Do not pause a trial at `last` values, because its script ends there by itself.
            if not self.budget and not trial.is_over and len(trial.curve) >= end and end < self.last:
                judgements[trial.number] = Judgement(
                    why=f"PBT: the end of generation {len(trial.legs)}, at {end} values"
                )
        return judgements

    def next(
        self, trials: Sequence[Trial], goal: Goal, space: Space, seed: int, *, is_last: bool, without: frozenset[str]
    ) -> Next | None:
        """Return a run that starts a trial's next generation, or None (`PausingPolicy.next`)."""
        if not is_last:
            return None
        for generation in sorted({len(trial.legs) for trial in trials}):
            there = [trial for trial in trials if len(trial.legs) >= generation]
            # Wait until all trials of the generation have ended, so that the seed determines the results.
            if any(len(trial.legs) == generation and not trial.is_over for trial in there):
                return None
            for trial in there:
                if len(trial.legs) == generation and self._goes_on(trial):
                    following = self._following(trial, there, generation, goal, space, seed, without)
                    if following is not None:
                        return following
        return None

    def waits(self, trial: Trial) -> bool:
        """Return whether a trial may still get a next generation."""
        has_ended = self.budget is not None and trial.status == states.COMPLETED
        return trial.is_paused or (has_ended and self._end(len(trial.legs)) < self.last)

    def argument(self, rung: int) -> tuple[str, int] | None:
        """Return (budget argument, value) for the generation that starts after `rung` values; None without `budget`."""
        return (self.budget, min(rung + self.interval, self.last)) if self.budget else None

    def told(self, trial: Trial, trials: Sequence[Trial], goal: Goal) -> str:
        """Return why a trial that waits for its next generation was not continued."""
        return f"PBT: the sweep has ended before generation {len(trial.legs) + 1} of it began"

    def to_json(self) -> dict[str, object]:
        return {**super().to_json(), "factors": list(self.factors)}

    def _end(self, generation: int) -> int:
        return generation * self.interval

    def _goes_on(self, trial: Trial) -> bool:
        # A failed trial ranks last and is replaced.
        return self.waits(trial) or (trial.status == states.FAILED and self._end(len(trial.legs)) < self.last)

    def _following(
        self,
        trial: Trial,
        there: Sequence[Trial],
        generation: int,
        goal: Goal,
        space: Space,
        seed: int,
        without: frozenset[str],
    ) -> Next | None:
        order = _ranked(there, generation, goal)
        place = order.index(trial) + 1
        count = min(math.ceil(len(order) * self.quantile), len(order) // 2)
        own = _result(trial, generation)
        # Trials with equal results are not replaced, because neither is worse.
        best = [
            other
            for other in order[:count]
            if (value := _result(other, generation)) is not None
            and value != own
            and other.legs[generation - 1].run_id not in without
        ]
        rung = self._end(generation)
        has_own = trial.status != states.FAILED and trial.run_id not in without
        said = "no finite number" if own is None else f"{own:g}"
        if has_own and (place <= len(order) - count or not best):
            why = f"PBT: goes on: {said} is number {place} of {len(order)}"
            return Next(number=trial.number, source=trial.run_id, chosen=trial.chosen, rung=rung, why=why)
        if not best:
            return None
        source = random.Random(seed_of(seed_of(seed, trial.number), generation))
        taken = source.choice(best)
        leg = taken.legs[generation - 1]
        chosen = explored(space, leg.chosen, source, factors=self.factors, resample=self.resample, mutate=self._mutated)
        why = (
            f"PBT: a copy of trial {taken.number}, number {order.index(taken) + 1} of {len(order)} with "
            f"{_result(taken, generation):g}, for {said} is number {place}{_changes(space, leg.chosen, chosen)}"
        )
        return Next(number=trial.number, source=leg.run_id, chosen=chosen, rung=rung, why=why)

    @property
    def _mutated(self) -> Sequence[str] | None:
        return [self.mutate] if isinstance(self.mutate, str) else self.mutate


def _result(trial: Trial, generation: int) -> float | None:
    leg = trial.legs[generation - 1]
    if leg.status == states.FAILED or not leg.curve or not math.isfinite(leg.curve[-1]):
        return None
    return leg.curve[-1]


def _ranked(trials: Sequence[Trial], generation: int, goal: Goal) -> list[Trial]:
    return sorted(trials, key=lambda trial: (cost(_result(trial, generation), goal), trial.number))


def _changes(space: Space, before: Mapping[str, Raw], after: Mapping[str, Raw]) -> str:
    old, new = space.values(before), space.values(after)
    changed = [
        f"{name.lstrip('-')} {_short(old[name])} -> {_short(new[name])}" for name in new if old[name] != new[name]
    ]
    return f"; {', '.join(changed)}" if changed else ""


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def explored(
    space: Space,
    chosen: Mapping[str, Raw],
    source: random.Random,
    *,
    factors: Sequence[float] = (0.8, 1.2),
    resample: float = 0.25,
    mutate: Sequence[str] | None = None,
) -> dict[str, Raw]:
    """Return a copy of the point `chosen` with randomly changed values, as {key: raw value}.

    `factors`: Numbers of which one, at random, multiplies a hyperparameter.
    `resample`: Probability that a hyperparameter is drawn from the space instead.
    `mutate`: Names, with or without dashes, of hyperparameters that change; None for all.
    """
    names = None if mutate is None else {name.lstrip("-") for name in mutate}

    def choose(dimension: Dimension) -> Raw:
        # Draw all three numbers even for a hyperparameter that is kept, so that `mutate` does not affect the others.
        anew, factor, quantile = source.random(), source.choice(list(factors)), source.random()
        raw, expression = chosen[dimension.key], dimension.expression
        is_kept = names is not None and dimension.name.lstrip("-") not in names
        if is_kept or dimension.branches or isinstance(expression, Fixed):
            return raw
        return expression.raw_at(quantile) if anew < resample else _moved(expression, raw, factor, quantile)

    return space.draw(choose)


def _moved(expression: object, raw: Raw, factor: float, quantile: float) -> Raw:
    if isinstance(expression, Choice):
        return _other(expression, int(raw), factor, quantile)
    if isinstance(expression, Integers):
        whole = round(raw * factor) if expression.low >= 0 else round(raw + (factor - 1) * expression.count / 2)
        return min(max(whole if whole != raw else int(raw) + _sign(factor), expression.low), expression.high - 1)
    if isinstance(expression, Normal):
        value = expression.value(raw)
        beside = value * factor if expression.is_log else value + (factor - 1) * expression.sigma
        if expression.q and expression.value(expression.raw(beside)) == value:
            beside = value + _sign(factor) * expression.q
        # If a step of a lognormal distribution leads to 0 or less, which has no quantile, keep the old value.
        return raw if expression.is_log and beside <= 0 else expression.raw(beside)
    assert isinstance(expression, Uniform)
    half = (expression.high - expression.low) / 2
    moved = raw * factor if expression.low >= 0 else raw + (factor - 1) * half
    moved = min(max(moved, expression.low), expression.high)
    if expression.q and expression.value(moved) == expression.value(raw):
        moved = min(max(raw + _sign(factor) * expression.q, expression.low), expression.high)
    return moved


def _other(expression: Choice, index: int, factor: float, quantile: float) -> int:
    options = expression.options
    if len(options) == 1:
        return index
    if all(map(is_number, options)) and list(options) in (sorted(options), sorted(options, reverse=True)):
        step = _sign(factor) if options[0] <= options[-1] else -_sign(factor)
        return min(max(index + step, 0), len(options) - 1)
    # Draw from the other options: skip the index of the current option.
    other = min(int(quantile * (len(options) - 1)), len(options) - 2)
    return other + (other >= index)


def _sign(factor: float) -> int:
    return 1 if factor >= 1 else -1
