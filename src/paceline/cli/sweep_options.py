"""Options of `sweep run` and `sweep again`."""

from __future__ import annotations

from paceline.cli.options import DETACH, JSON, Duration, VerbOption
from paceline.cli.run_options import RUN

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
        "Form of the values for the script: arguments (--lr 0.1, the default), equals (--lr=0.1), words (--sizes 1 2 of a "
        "list), repeated (--size=1 --size=2), commas (--sizes=1,2), assignments (lr=0.1), additions (+lr=0.1), environment (a "
        "variable lr), or the name of a JSON file, such as parameters.json. Default: detected from the script's text.",
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
