"""The handle on a submitted sweep."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from paceline.errors import SweepError, UserError
from paceline.runs.record import RunRecord
from paceline.runs.run import ExperimentLike, Run
from paceline.runs.visible import visible_line
from paceline.sweeps import live_trials, results, trial_runs
from paceline.sweeps.again import changed, submit_again
from paceline.sweeps.live_trials import Board
from paceline.sweeps.pictures import draw
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.start import more
from paceline.sweeps.trial import Trial


class SweepRun(Run):
    """A sweep's run, whose children are the trials.

    Raises:
        SweepError: The run is no sweep.

    Examples:
        >>> script = pl.Estimator(entry_script="train.py")
        >>> sweep = pl.Sweep(script, {"--lr": pl.choice(0.1, 0.2)}, metric="loss", goal="minimize", sampler="grid")
        >>> run = pl.Experiment(pl.Workspace("my_runs"), "digits").submit(sweep)
        >>> status = run.wait_for_completion().status
        >>> run.best_point()
        {'--lr': 0.1}
    """

    def __init__(self, experiment: ExperimentLike, run_id: str) -> None:
        super().__init__(experiment, run_id)
        if self.record().sweep is None:
            raise SweepError(f"run {self.id} is not a sweep; its kind is {self.record().kind}.")

    @classmethod
    def _handle(cls, experiment: ExperimentLike, record: RunRecord) -> Any:
        return Run._handle(experiment, record)

    def _repr_html_(self) -> str:
        return super()._repr_html_() + live_trials.html_of(Board(self._folder).look())

    def wait_for_completion(self, show_output: bool = False, raise_on_error: bool = True) -> RunRecord:
        """Wait until the sweep has ended and return its record.

        Ctrl-C stops the waiting, not the sweep.

        Args:
            show_output: Whether to show a live table of the trials, or the controller's log if no table is possible.
            raise_on_error: Raise if the sweep has failed.

        Raises:
            RunFailedError: All trials failed, or as many as max_failures, unless raise_on_error=False.
        """
        if show_output:
            try:
                live_trials.follow(self._folder, sys.stdout, lambda line: print(visible_line(line), flush=True))
            except KeyboardInterrupt:
                print(f"\n{live_trials.way_back(self._folder)}", file=sys.stderr)
                raise
        return super().wait_for_completion(raise_on_error=raise_on_error)

    @property
    def spec(self) -> SweepSpec:
        """The sweep's space, metrics and limits."""
        return SweepSpec.from_json(self.record().sweep or {})

    def trials(self) -> Any:
        """Return the trials as a pandas frame, one row each.

        Columns: trial, run_id, status, the metric's best value, intervals (number of values), started_utc, duration_s,
        and each hyperparameter. Leading dashes are removed unless the name is another column's, as in `--status`.

        Raises:
            UserError: pandas is not installed. `trial_rows()` does not need it.
        """
        try:
            import pandas
        except ImportError as error:
            raise UserError(
                "trials() needs pandas: pip install 'paceline[tabular]'. trial_rows() works without it."
            ) from error
        rows = self.trial_rows()
        # Name the columns, so that a frame without trials has columns too.
        return pandas.DataFrame(rows, columns=results.column_names(rows, self.spec))

    def trial_rows(self) -> list[dict[str, Any]]:
        """Return the rows of `trials()` as mappings, without pandas."""
        return results.rows(self._trials(), self.spec)

    def lineage(self) -> list[dict[str, Any]]:
        """Return a row for each run of each trial, as dicts.

        Keys: trial, run_id, from (run that gave the checkpoints), why (reason for the run), status, best, last,
        intervals (number of values), and each hyperparameter. A trial that was paused and continued has several runs.
        """
        return results.lineage(self._trials(), self.spec)

    def best_children(self) -> list[Run]:
        """Return the best trial's run, or with several metrics the runs on the Pareto front."""
        spec = self.spec
        best = results.best_trials(self._trials(), spec)
        return [Run(self._experiment, trial.best_leg(spec.goal).run_id) for trial in best]

    def best_child(self) -> Run | None:
        """Return the run with the metric's best value; None before the first value.

        Raises:
            SweepError: The sweep has several metrics.
        """
        best = self._only_best("best_children()")
        return None if best is None else Run(self._experiment, best.best_leg(self.spec.goal).run_id)

    def best_point(self) -> dict[str, Any] | None:
        """Return the best trial's hyperparameters by name, or None without a value.

        Raises:
            SweepError: The sweep has several metrics.
        """
        best = self._only_best("trial_rows()")
        return None if best is None else dict(best.best_leg(self.spec.goal).values)

    def draw(self, folder: str | os.PathLike[str]) -> list[str]:
        """Draw the sweep into a folder, and return the paths.

        One HTML file holds the history, parallel coordinates and importance. If matplotlib is installed, PNG files of
        these figures are written too. When a sweep ends, it draws the same files into its outputs.

        Args:
            folder: Folder to write to, which is created if it does not exist.
        """
        trials = self._trials()
        return draw.into(Path(folder), draw.sketched(f"Sweep {self.id}", self.spec, trials))

    def more(self, trials: int) -> None:
        """Request more trials of a running or ended sweep.

        Args:
            trials: Number of trials to add. An ended sweep keeps its trials.

        Raises:
            SweepError: The number is below 1, or the sweep would have too many trials.
        """
        more(self._folder, trials)

    def again(
        self,
        space: Mapping[str, object] | None = None,
        *,
        without: Collection[str] = (),
        trials: int | None = None,
        concurrent: int | None = None,
        sampler: str | None = None,
        learn: bool = False,
    ) -> SweepRun:
        """Start a copy of this sweep with a changed space.

        Args:
            space: Hyperparameters to change or to add, as a dict of names to expressions.
            without: Names of hyperparameters to remove.
            trials: Number of trials; None for this sweep's number.
            concurrent: Maximum number of trials at a time; None for this sweep's maximum.
            sampler: A sampler's name; None for this sweep's sampler.
            learn: Whether to give the sampler the results of this sweep.

        Raises:
            SweepError: A value is wrong.

        Examples:
            >>> new = run.again({"--lr": pl.choice(0.05, 0.1)}, trials=2)
            >>> new.wait_for_completion().status
            'Completed'
        """
        folder = submit_again(
            self._folder,
            self._folder.path.parent.parent,
            space=changed(self.spec.space, space or {}, without),
            trials=trials,
            concurrent=concurrent,
            sampler=sampler,
            learn=learn,
        )
        return SweepRun(self._experiment, folder.run_id)

    def _only_best(self, instead: str) -> Trial | None:
        spec = self.spec
        if spec.further:
            raise SweepError(
                f"sweep {self.id} has {len(spec.metrics)} metrics, and no trial is the best in all. Take {instead}: those on "
                "the Pareto front."
            )
        return results.best_trial(self._trials(), spec)

    def _trials(self) -> list[Trial]:
        return trial_runs.trials(self._folder, self.spec)
