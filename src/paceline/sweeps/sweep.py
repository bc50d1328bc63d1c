"""The public description of a sweep."""

from __future__ import annotations

import datetime as dt
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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
    """A hyperparameter sweep: an estimator's script, a search space, and limits.

    `Experiment.submit` starts the sweep.

    Args:
        estimator: The script of each trial, with its workers, nodes, target, environment and data.
        space: A dict of names to expressions (`choice`, `uniform`, `loguniform`, ...) or values; see `paceline.sweeps.space`.
        metric: The primary metric, by the name that the script logs. With lists of metrics and goals, such as
            metric=["accuracy", "latency"], goal=["maximize", "minimize"], the sweep searches for the Pareto front.
        goal: "maximize" or "minimize".
        trials: Number of trials in all (default 20).
        concurrent: Number of trials at a time (default 4).
        sampler: "random", "grid", "tpe", "cmaes", "gp", or "module:function" in the source: a function that makes an
            Optuna sampler from a seed.
        stop: A policy that stops trials early: `Bandit`, `MedianStopping`, `TruncationSelection`, `ASHA`, `Hyperband`; or one
            that pauses trials and continues them from checkpoints: `ASHA(promote=True)`, `PopulationBasedTraining`.
        seed: Seed of the sampler. By default, a random seed, which the sweep records.
        points: Points to try first, each as a dict of names to values.
        max_failures: Number of failed trials that ends the sweep; None for no limit.
        max_duration_seconds: Seconds until the sweep must end, or text such as "2h"; None for no limit.
        repeats: Whether a point of a finite space may be tried twice.
        pass_as: How the script gets the values: "arguments" (`--lr 0.1`, or another form if the script needs it),
            "equals" (`--lr=0.1`), "words" (`--sizes 1 2`), "repeated" (`--size=1 --size=2`), "commas" (`--sizes=1,2`),
            "assignments" (`lr=0.1`), "additions" (`+lr=0.1`), "environment" (a variable lr), or the name of a JSON file
            in the working directory, such as "parameters.json".
        switches: Hyperparameters with the values true and false that the script takes as a single word, such as `--amp` or
            `--amp/--no-amp`: true gives the first word, false the second, or none. Switches that the script declares by
            argparse or click are detected.
        array_size: Number of trials in one job array of Slurm or one Job of Kubernetes. Only with these targets.
        warm_start: Former sweeps, or their run ids, whose results the sampler gets from the start.
        controller: "slurm" or "ray" if the trials run there: a small job then controls the sweep, so this machine may
            shut down. The job must see the workspace. None for a process on this machine.

    Raises:
        SweepError: A value is wrong.

    Examples:
        >>> script = pl.Estimator(entry_script="train.py")
        >>> sweep = pl.Sweep(script, {"--lr": pl.loguniform(1e-4, 1)}, metric="loss", goal="minimize", trials=2, seed=1)
        >>> run = pl.Experiment(pl.Workspace("my_runs"), "digits").submit(sweep)
        >>> run.wait_for_completion().status
        'Completed'
    """

    estimator: Script
    space: Mapping[str, object]
    _: KW_ONLY
    metric: str | Sequence[str]
    goal: Goal | Sequence[Goal] = "maximize"
    trials: int = 20
    concurrent: int = 4
    sampler: str = "random"
    stop: Policy | None = None
    seed: int | None = None
    points: Sequence[Mapping[str, object]] = ()
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
            # Draw the seed once: `spec` is called again at submission and must return the same spec.
            self.seed = secrets.randbelow(1 << 31)
        # Call `spec` for its checks, so that mistakes are reported where the user wrote them.
        self.spec()

    def spec(self) -> SweepSpec:
        """Return the frozen description of the sweep for its record."""
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
        """Start the sweep. `Experiment.submit` calls this."""
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
