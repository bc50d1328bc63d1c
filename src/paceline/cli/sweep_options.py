"""Options of `sweep run`, and the conversion of options and a file's section to a sweep."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline.cli.common import refuse
from paceline.cli.options import DETACH, JSON, Duration, Given, VerbOption
from paceline.cli.run_options import RUN
from paceline.errors import SweepError
from paceline.sweeps.expressions import Expression, parse
from paceline.sweeps.points import as_switch
from paceline.sweeps.policies.policies import parse_policy
from paceline.sweeps.samplers.samplers import check_sampler
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec, listed, objectives
from paceline.system import units
from paceline.system.names import did_you_mean

# Leave out these options of `run`: a sweep defines its own --dry-run, --quiet and --json, and has no --yaml.
_NOT_A_SWEEPS = ("dry_run", "yaml", "quiet", "as_json")

SWEEP = (
    *(option for option in RUN if option.name not in _NOT_A_SWEEPS),
    VerbOption(
        "--param",
        "Hyperparameter; may be repeated. Expressions: choice(32,64), uniform(0,1), loguniform(1e-4,1e-1), randint(1,5), "
        "normal(0,1), and with a step quniform(0,1,0.1) and the like; else one value.",
        "NAME=EXPRESSION",
        list,
        section="The sweep",
    ),
    VerbOption(
        "--metric",
        "The primary metric, as the script logs it. Several, each with its goal, look for the Pareto front: --metric "
        "accuracy=maximize --metric latency=minimize.",
        "NAME[=GOAL]",
        list,
    ),
    VerbOption("--maximize/--minimize", "Goal of the metric. Default: maximize.", type=bool),
    VerbOption("--trials", "Number of trials; default: 20.", "N", int),
    VerbOption("--concurrent", "Most trials at a time; default: 4.", "N", int),
    VerbOption(
        "--sampler",
        "Sampler: random, grid, tpe, cmaes, gp, or module:function of the source folder. Default: random.",
        "NAME",
    ),
    VerbOption(
        "--stop",
        "Policy that stops trials early: asha(first=3,eta=3), hyperband(last=81), bandit(slack_factor=0.1), median, "
        "truncation(truncation_percentage=20). From checkpoints: asha(promote=true), pbt(interval=5,last=50).",
        "POLICY",
    ),
    VerbOption("--seed", "Seed of the sampler; default: random.", "N", int),
    VerbOption("--point", "Point to try first, such as lr=0.01,batch=32; may be repeated.", "NAME=VALUE,...", list),
    VerbOption(
        "--warm-start",
        "Former sweep whose results the sampler learns from; may be repeated.",
        "RUN",
        list,
        complete="run_ids",
    ),
    VerbOption("--max-failures", "End the sweep after this number of failed trials.", "N", int),
    VerbOption("--max-sweep-duration", "End the sweep after this time, such as 90s or 1h30m.", type=Duration()),
    VerbOption(
        "--pass-as",
        "Form of the values for the script: arguments (--lr 0.1, the default), equals (--lr=0.1), words (--sizes 1 2 "
        "of a list), repeated (--size=1 --size=2), commas (--sizes=1,2), assignments (lr=0.1), additions (+lr=0.1), "
        "environment (a variable lr), or the name of a JSON file, such as parameters.json. Default: detected from the "
        "script's text.",
        "WAY",
    ),
    VerbOption(
        "--switch",
        "Boolean hyperparameter that is an argument without a value: amp, or amp/no-amp for --amp and --no-amp; may be "
        "repeated. Switches declared by argparse or click are detected.",
        "NAME",
        list,
    ),
    VerbOption("--repeats", "Allow repeated points in a finite space.", type=bool),
    VerbOption("--array-size", "With a target of kind slurm or kubernetes: trials in one job.", "N", int),
    VerbOption(
        "--controller",
        "slurm or ray: run the controller as a small job of the trials' engine, so that this machine may shut down. "
        "Default: a process on this machine.",
        "ENGINE",
    ),
    VerbOption("--dry-run", "Print ten points of the space and start nothing.", type=bool, section="What is printed"),
    DETACH,
    JSON,
    VerbOption("-q --quiet", "Print only errors, and with --json the JSON.", type=bool),
)

QUIET = SWEEP[-1]
#: Options of `sweep again`, which change settings of an earlier sweep.
AGAIN = (
    VerbOption("--param", "Hyperparameter to change or to add; may be repeated.", "NAME=EXPRESSION", list),
    VerbOption("--without", "Hyperparameter to remove; may be repeated.", "NAME", list),
    VerbOption("--trials", "Number of trials; default: as before.", "N", int),
    VerbOption("--concurrent", "Most trials at a time; default: as before.", "N", int),
    VerbOption("--sampler", "Sampler; default: as before.", "NAME"),
    VerbOption("--learn", "Give the sampler the results of the earlier sweep.", type=bool),
)

#: Keys of the section `sweep` in a job file. The fields of `SweepSpec` have these names, or are computed from these keys.
_KEYS = (
    *("space", "metric", "goal", "trials", "concurrent", "sampler", "stop", "seed", "points", "max_failures"),
    *("max_duration_seconds", "repeats", "pass_as", "switches", "array_size", "controller", "warm_start"),
)
#: Keys in `_KEYS` whose command-line options have the same names.
_SAME = ("trials", "concurrent", "sampler", "seed", "max_failures", "pass_as", "array_size", "controller", "repeats")


def spec(given: Given, section: Mapping[str, Any], file: Path | None, former: Callable[[str], str]) -> SweepSpec:
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
    none = "a sweep needs hyperparameters. Give --param lr=loguniform(1e-4,1e-1), once for each."
    refuse(SweepError, (not parts, none))
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


def _judge(given: Given, found: dict[str, Any]) -> None:
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
    none = "say by which metric trials are judged: --metric NAME, as the script logs it."
    refuse(SweepError, (not found.get("metric"), none))
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
    from paceline.sweeps.expressions import choice

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
    from paceline.sweeps.expressions import call_of

    _, words = call_of(f"point({text})") or ("", [])
    if not words or not all(name for name, _ in words):
        raise SweepError(f"--point {text!r} is not NAME=VALUE,..., such as lr=0.01,batch=32.")
    return dict(words)
