"""Results of former sweeps for samplers to learn from.

The submission copies the results into the new sweep's folder. So users may remove a former sweep afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from paceline.errors import RunNotFoundError, SweepError
from paceline.runs import states, store
from paceline.runs.folder import RunFolder
from paceline.sweeps.curves import CurveReader
from paceline.sweeps.expressions import Fixed, Raw
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import Trial
from paceline.sweeps.trial_runs import all_runs, trial_of
from paceline.system.files import read_json, write_json

#: File in the sweep's folder with the results of earlier sweeps from which the sampler learns.
_FILE = "prior.json"
#: Samplers that do not learn from results.
_UNTAUGHT = ("random", "grid")


class KnownResult(TypedDict):
    """A former trial's metric values at a point of the new sweep's space."""

    run_id: str
    chosen: dict[str, Raw]
    values: list[float]


def known_results(spec: SweepSpec, runs_dir: Path) -> list[KnownResult]:
    """Return the results of the former sweeps in `spec.warm_start`.

    A result has values of the new sweep's metrics at a point of its space. Failed trials, trials without a value and
    points outside the space are excluded.

    Raises:
        SweepError: A sweep does not exist, its space does not fit, it has no results, or the sampler does not learn.
    """
    if spec.warm_start and spec.sampler in _UNTAUGHT:
        raise SweepError(
            f"warm_start with the sampler {spec.sampler!r}, which learns nothing from results. Take tpe, cmaes, gp or one of "
            "your own."
        )
    return [result for run_id in spec.warm_start for result in _of_sweep(run_id, spec, runs_dir)]


def keep(folder: RunFolder, results: Sequence[KnownResult]) -> None:
    """Write the results of former sweeps into the new sweep's folder."""
    if results:
        write_json(folder.path / _FILE, list(results))


def prior_trials(folder: RunFolder, spec: SweepSpec) -> list[Trial]:
    """Return former sweeps' results as trials, which have negative trial numbers."""
    results = read_json(folder.path / _FILE)
    if results is None:
        # A submission that was killed has not written the results, so read the former runs.
        results = known_results(spec, folder.path.parent)
        keep(folder, results)
    return as_trials(results)


def as_trials(results: Sequence[KnownResult]) -> list[Trial]:
    """Return results of `known_results` as trials, which have negative trial numbers."""
    return [
        Trial(
            number=number - len(results),
            run_id=result["run_id"],
            chosen=result["chosen"],
            status=states.COMPLETED,
            curve=(result["values"][0],),
            further=tuple((value,) for value in result["values"][1:]),
        )
        for number, result in enumerate(results)
    ]


def _of_sweep(run_id: str, spec: SweepSpec, runs_dir: Path) -> list[KnownResult]:
    folder = RunFolder(runs_dir / run_id)
    try:
        record = store.stored(folder)
    except RunNotFoundError:
        raise SweepError(f"warm_start: there is no run {run_id!r} in this workspace.") from None
    if record.sweep is None:
        raise SweepError(f"warm_start: run {run_id} is not a sweep; its kind is {record.kind}.")
    former = SweepSpec.from_json(record.sweep)
    _check_names(run_id, former.space, spec.space)
    # Read the runs, since the former sweep's cache may lack metrics of the new sweep.
    judged = _judged_by(former, spec)
    known = [trial_of(records, runs_dir, judged) for records in all_runs(folder, judged)]
    trials = [trial for trial in known if trial.status != states.FAILED]
    results: list[KnownResult] = []
    outside = ""
    for trial in trials:
        values = _values(trial, spec)
        if values is None or not trial.is_over:
            continue
        try:
            chosen = spec.space.chosen(_varied(trial, spec.space))
        except SweepError as error:
            outside = outside or str(error)
            continue
        results.append({"run_id": trial.run_id, "chosen": chosen, "values": list(values)})
    if not results and outside:
        raise SweepError(f"warm_start: no result of sweep {run_id} fits this space: {outside}")
    if not results:
        names = sorted({name for t in trials[:3] for name in CurveReader(runs_dir / t.run_id / "metrics", "").names})
        logged = f" Its trials have logged {', '.join(names)}." if names else ""
        raise SweepError(
            f"warm_start: no trial of sweep {run_id} has ended with a value of {' and '.join(spec.metrics)}.{logged}"
        )
    return results


def _judged_by(former: SweepSpec, spec: SweepSpec) -> SweepSpec:
    stop = former.stop if len(spec.metrics) == 1 else None
    return dataclasses.replace(former, metric=spec.metric, goal=spec.goal, further=spec.further, stop=stop)


def _values(trial: Trial, spec: SweepSpec) -> tuple[float, ...] | None:
    if len(spec.metrics) > 1:
        return trial.last
    value = trial.best(spec.goal)
    return None if value is None else (value,)


def _varied(trial: Trial, space: Space) -> dict[str, object]:
    names = _names(space)
    return {name: value for name, value in trial.values.items() if name.lstrip("-") in names}


def _check_names(run_id: str, former: Space, space: Space) -> None:
    missing = sorted(_names(space, constants=False) - _names(former))
    more = sorted(_names(former, constants=False) - _names(space))
    if missing or more:
        parts = [f"it did not vary {', '.join(missing)}"] if missing else []
        parts += [f"it varied {', '.join(more)}, which this one does not"] if more else []
        raise SweepError(f"warm_start: the space of sweep {run_id} does not fit: {', and '.join(parts)}.")


def _names(space: Space, *, constants: bool = True) -> set[str]:
    return {
        dimension.name.lstrip("-")
        for dimension in space.parameters
        if constants or not isinstance(dimension.expression, Fixed)
    }
