"""What the user writes for a sweep, beside an estimator."""

from __future__ import annotations

import datetime as dt
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paceline.errors import SweepError
from paceline.estimator import is_estimator
from paceline.runs.run import Run
from paceline.submit import SourceCopy
from paceline.sweeps.points import ARGUMENTS, as_switch
from paceline.sweeps.policies.policy import Policy
from paceline.sweeps.samplers.samplers import check_sampler
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec, listed, objectives
from paceline.sweeps.start import submit_sweep
from paceline.sweeps.trial import Goal
from paceline.system import units

if TYPE_CHECKING:
    from paceline.estimator import _Script as Script
    from paceline.runs.folder import RunFolder
    from paceline.snapshot import Progress


@dataclass
class Sweep:
    """Hyperparameters of an estimator's script, tried in runs of their own; `Experiment.submit` starts it.

    estimator: what each trial runs: workers, nodes, target, environment and data are its own.
    space: name -> expression (`choice`, `uniform`, `loguniform`, ...) or value; see `paceline.sweeps.space`.
    metric: the primary one, by the name under which the script logs it. goal: "maximize" or "minimize". Several of both, such as
        metric=["accuracy", "latency"], goal=["maximize", "minimize"], look for the trials to which no other is better in all.
    trials: in all (default 20). concurrent: at a time (default 4).
    sampler: "random", "grid", "tpe", "cmaes", "gp", or "module:function" of one of the source's own that makes an Optuna
        sampler of a seed.
    stop: a policy that stops trials early: `Bandit`, `MedianStopping`, `TruncationSelection`, `ASHA`, `Hyperband`;
        or one that pauses them and goes on from checkpoints: `ASHA(promote=True)`, `PopulationBasedTraining`.
    seed: what is proposed depends on it, on a trial's number and on what is known by then; default: drawn, and recorded.
    points: tried first, each name -> value.
    warm_start: former sweeps, or their run ids, whose results the sampler is told from the start.
    pass_as: how the script gets the values: "arguments" (`--lr 0.1`; where the script's text certainly tells another form, that),
        "equals" (`--lr=0.1`), "words" (`--sizes 1 2`), "repeated" (`--size=1 --size=2`), "commas" (`--sizes=1,2`), "assignments"
        (`lr=0.1`), "additions" (`+lr=0.1`), "environment" (a variable lr), or the name of a JSON file in its working directory,
        such as "parameters.json".
    switches: hyperparameters of true and false that the script takes without a value, such as `--amp`, or `--amp/--no-amp`: true
        gives the first word, false the second, or none. Those that the script declares by argparse or click are found by
        themselves.
    controller: "slurm" or "ray", the engine of the trials: a small job of its own looks after the sweep, so that this machine may
        be shut down. The workspace has to be seen there. Default: a process of this machine.
    array_size: with a target of kind slurm: so many trials in one job array, each a task of it.
    max_failures: failed trials that end the sweep. max_duration_seconds: seconds, or "2h". repeats: let a point come twice.

    Raises:
        SweepError: a value is wrong; the message names it, the rule and what to write instead.
    """

    estimator: Script
    space: Mapping[str, Any]
    _: KW_ONLY
    metric: str | Sequence[str]
    goal: Goal | Sequence[Goal] = "maximize"
    trials: int = 20
    concurrent: int = 4
    sampler: str = "random"
    stop: Policy | None = None
    seed: int | None = None
    points: Sequence[Mapping[str, Any]] = ()
    max_failures: int | None = None
    max_duration_seconds: float | str | dt.timedelta | None = None
    repeats: bool = False
    pass_as: str = ARGUMENTS
    switches: Sequence[str] = ()
    array_size: int | None = None
    warm_start: Sequence[Run | str] | Run | str = ()
    controller: Literal["slurm", "ray"] | None = None

    def __post_init__(self) -> None:
        if not is_estimator(self.estimator):
            raise SweepError(
                f"a sweep is made of an Estimator, PyTorch, TensorFlow or SKLearn, not of a {type(self.estimator).__name__}."
            )
        if self.seed is None:
            # Drawn once and kept: `spec` is called again at submission and has to say the same.
            self.seed = secrets.randbelow(1 << 31)
        # Only for its checks: a mistake is told where the user wrote it, before anything is submitted.
        self.spec()

    def spec(self) -> SweepSpec:
        """The sweep as its record will hold it."""
        try:
            limit = None if self.max_duration_seconds is None else units.seconds(self.max_duration_seconds)
        except ValueError as error:
            raise SweepError(f"max_duration_seconds: {error}") from None
        former = self.warm_start
        spec = SweepSpec(
            space=Space(self.space),
            trials=self.trials,
            concurrent=self.concurrent,
            sampler=self.sampler,
            seed=self.seed if self.seed is not None else 0,
            stop=self.stop,
            points=listed("points", self.points),
            max_failures=self.max_failures,
            max_duration_seconds=limit,
            repeats=self.repeats,
            pass_as=self.pass_as,
            switches=tuple(map(as_switch, listed("switches", self.switches))),
            array_size=self.array_size,
            controller=self.controller,
            warm_start=tuple(_id(run) for run in (former if isinstance(former, (list, tuple)) else (former,))),
            **objectives(self.metric, self.goal),
        )
        check_sampler(spec.sampler, spec.space, spec.goals)
        return spec

    def submit(
        self,
        workspace_dir: Path,
        experiment: str,
        *,
        tags: Mapping[str, object] | None = None,
        progress: Progress | None = None,
        display_name: str | None = None,
    ) -> RunFolder:
        """Start it. `Experiment.submit` calls this."""
        source = SourceCopy(directory=Path(self.estimator.source_directory or ".").absolute())
        return submit_sweep(
            self.estimator.job(),
            self.spec(),
            source,
            workspace_dir,
            experiment,
            tags=tags,
            progress=progress,
            display_name=display_name,
        )


def _id(run: Run | str) -> str:
    return run.id if isinstance(run, Run) else run
