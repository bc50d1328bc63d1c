"""Read sweep files, and combine them with the options of `paceline sweep run`."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import SweepError
from paceline.job_files.description import Asked
from paceline.runs.folder import RunFolder
from paceline.sweeps import start
from paceline.sweeps.expressions import Expression, call_of, choice, parse
from paceline.sweeps.points import as_switch
from paceline.sweeps.policies.policies import parse_policy
from paceline.sweeps.samplers.samplers import check_sampler
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec, listed, objectives
from paceline.system import units
from paceline.system.names import did_you_mean

#: Keys of the section `sweep` in a job file. The fields of `SweepSpec` have these names, or are computed from these keys.
_KEYS = (
    *("space", "metric", "goal", "trials", "concurrent", "sampler", "stop", "seed", "points", "max_failures"),
    *("max_duration_seconds", "repeats", "pass_as", "switches", "array_size", "controller", "warm_start"),
)
#: Keys in `_KEYS` whose command-line options have the same names.
_SAME = ("trials", "concurrent", "sampler", "seed", "max_failures", "pass_as", "array_size", "controller", "repeats")


@dataclass(frozen=True, kw_only=True)
class AskedSweep(Asked):
    """The job of a sweep's trials, the settings of its submission, and the sweep."""

    spec: SweepSpec

    @staticmethod
    def of(asked: Asked, section: object, file: Path) -> AskedSweep:
        """Return the sweep that a file's section `sweep` describes."""
        return AskedSweep(
            **vars(asked), spec=spec(defaultdict(lambda: None), checked_section(section, file), file, str)
        )

    def check(self, workspace_dir: Path) -> None:
        """Raise UserError if checks show that the sweep would fail."""
        start.checked(self.job, self.spec, self.source, workspace_dir, self.experiment, self.values)

    def submit(
        self, workspace_dir: Path, *, progress: Callable[[int, int], None] | None = None, run_id: str | None = None
    ) -> RunFolder:
        """Submit the sweep and return its folder."""
        return start.submit_sweep(
            self.job,
            self.spec,
            self.source,
            workspace_dir,
            self.experiment,
            tags=self.tags,
            progress=progress,
            display_name=self.display_name,
            values=self.values,
            leave_out=self.leave_out,
            run_id=run_id,
        )


def checked_section(section: object, file: Path | None) -> Mapping[str, Any]:
    """Return a file's section `sweep`. Raise SweepError unless it is a mapping."""
    if not isinstance(section, dict):
        raise SweepError(f"{str(file)!r}: sweep takes keys and values, such as `metric: accuracy`.")
    return section


def spec(
    given: Mapping[str, Any], section: Mapping[str, Any], file: Path | None, former: Callable[[str], str]
) -> SweepSpec:
    """Return the sweep that options and a file's section describe. Options take precedence.

    `former` is a function that returns the full id for a possibly shortened id of an earlier sweep.
    """
    if unknown := sorted(set(section) - set(_KEYS)):
        raise SweepError(
            f"{str(file)!r}: sweep has an unknown key {unknown[0]!r}.{did_you_mean(unknown[0], _KEYS)} Known are "
            f"{', '.join(_KEYS)}."
        )
    found: dict[str, Any] = dict(section)
    # A hyperparameter on the command line replaces the hyperparameter of the same name in the file.
    parts = {
        **_space(section.get("space") or {}),
        **{name: parse(text) for name, text in params(given["param"]).items()},
    }
    if not parts:
        raise SweepError("a sweep needs hyperparameters. Give --param lr=loguniform(1e-4,1e-1), once for each.")
    found["space"] = Space(parts)
    found |= {name: given[name] for name in _SAME if given[name] is not None and given[name] is not False}
    _judge(given, found)
    if given["max_sweep_duration"] is not None:
        found["max_duration_seconds"] = given["max_sweep_duration"]
    elif isinstance(limit := found.get("max_duration_seconds"), str):
        try:
            found["max_duration_seconds"] = units.seconds(limit)
        except ValueError as error:
            raise SweepError(f"{str(file)!r}: max_duration_seconds: {error}") from None
    stop = given["stop"] or found.get("stop")
    found["stop"] = parse_policy(str(stop)) if stop else None
    # The sweep tries the points of the file first, then the points of the command line.
    found["points"] = listed("points", found.get("points") or ()) + tuple(_point(text) for text in given["point"] or ())
    runs = listed("warm_start", given["warm_start"] or found.get("warm_start") or ())
    found["warm_start"] = tuple(former(str(run)) for run in runs)
    switches = listed("switches", given["switch"] or found.get("switches") or ())
    found["switches"] = tuple(as_switch(str(name)) for name in switches)
    # Choose the seed once and record it, so that a restarted controller proposes the same points.
    found.setdefault("seed", secrets.randbelow(1 << 31))
    try:
        made = SweepSpec(**found)
    except TypeError as error:
        raise SweepError(f"{str(file)!r}: sweep: {error}.") from None
    check_sampler(made.sampler, made.space, made.goals)
    return made


def _judge(given: Mapping[str, Any], found: dict[str, Any]) -> None:
    general = None if given["maximize"] is None else "maximize" if given["maximize"] else "minimize"
    if given["metric"]:
        names, goals = [], []
        for word in given["metric"]:
            name, _, goal = word.rpartition("=")
            # Split at the last "=", because the name of a metric may contain "=".
            is_goal = goal in ("maximize", "minimize") and name
            names.append(name if is_goal else word)
            goals.append(goal if is_goal else general)
        if len(names) > 1 and None in goals:
            raise SweepError(
                f"--metric {names[goals.index(None)]} needs a goal, because there are several metrics. Write such as --metric "
                "latency=minimize."
            )
        found["metric"], own = names, [goal or found.get("goal") or "maximize" for goal in goals]
        found["goal"] = own[0] if len(own) == 1 else own
    elif general is not None:
        found["goal"] = general
    if not found.get("metric"):
        raise SweepError("say by which metric trials are judged: --metric NAME, as the script logs it.")
    found |= objectives(found["metric"], found.get("goal", "maximize"))


def params(given: list[str] | None) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in given or ():
        name, equals, text = word.partition("=")
        if not name or not equals or not text:
            raise SweepError(f"--param {word!r} is not NAME=EXPRESSION, such as lr=loguniform(1e-4,1e-1).")
        if name in found:
            raise SweepError(f"--param {name} is given twice.")
        found[name] = text
    return found


def _space(section: Any) -> dict[str, Any]:
    """Parse a sweep file's `space`, in which texts are expressions and lists are choices."""
    if not isinstance(section, Mapping):
        raise SweepError("the space of a sweep file is a mapping, a line each, such as `lr: loguniform(1e-4, 1e-1)`.")
    return {str(name): _part(part) for name, part in section.items()}


def _part(part: Any) -> Any:
    if isinstance(part, str):
        return parse(part)
    if isinstance(part, Mapping):
        return _space(part)
    if isinstance(part, list):
        spaces = [_space(option) if isinstance(option, Mapping) else option for option in part]
        # If the only value is a list, choice(list) would treat it as the list of all values. Wrap it in another list.
        return choice(*spaces) if len(spaces) != 1 else choice(spaces)
    assert not isinstance(part, Expression), "YAML knows none"
    return part


def _point(text: str) -> dict[str, Any]:
    _, words = call_of(f"point({text})") or ("", [])
    if not words or not all(name for name, _ in words):
        raise SweepError(f"--point {text!r} is not NAME=VALUE,..., such as lr=0.01,batch=32.")
    return dict(words)
