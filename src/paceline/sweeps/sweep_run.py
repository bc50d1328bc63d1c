"""The live handle on a sweep: a run that has trials."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from paceline.errors import SweepError, UserError
from paceline.runs.record import RunRecord
from paceline.runs.run import ExperimentLike, Run
from paceline.runs.visible import visible_line
from paceline.sweeps import live_trials, results, trial_runs
from paceline.sweeps.live_trials import Board
from paceline.sweeps.pictures import draw
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.start import more
from paceline.sweeps.trial import Trial


class SweepRun(Run):
    """A sweep. As a run it has a state, a log (`logs/driver.log`) and outputs; its trials are its children.

    Raises:
        SweepError: the run is no sweep.
    """

    def __init__(self, experiment: ExperimentLike, run_id: str) -> None:
        super().__init__(experiment, run_id)
        if self.record().sweep is None:
            raise SweepError(f"run {self.id} is no sweep; its kind is {self.record().kind}.")

    @classmethod
    def _handle(cls, experiment: ExperimentLike, record: RunRecord) -> Any:
        return Run._handle(experiment, record)

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the sweep as any run, and its trials."""
        return super()._repr_html_() + live_trials.html_of(Board(self._folder).look())

    def wait_for_completion(self, show_output: bool = False, raise_on_error: bool = True) -> RunRecord:
        """Block until the sweep has ended; its record then. Ctrl-C only stops the waiting.

        show_output: show its trials as a table that is kept up to date, on a terminal or in a notebook; elsewhere print what
            its controller says as it comes.

        Raises:
            RunFailedError: the sweep failed, unless raise_on_error=False: all trials did, or as many as max_failures says.
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
        """What it tries, and how it judges."""
        return SweepSpec.from_json(self.record().sweep or {})

    def trials(self) -> Any:
        """The trials as a pandas frame, one row each: trial, run_id, status, the metric's best value, intervals (how often it was
        logged), started_utc, duration_s, and a column for each hyperparameter. One whose name is taken keeps its dashes: a
        hyperparameter called status has the column `--status`.

        Raises:
            UserError: pandas is not installed; `trial_rows()` needs none.
        """
        try:
            import pandas
        except ImportError as error:
            raise UserError(
                "trials() needs pandas: pip install 'paceline[tabular]'. trial_rows() needs none."
            ) from error
        rows = self.trial_rows()
        # A sweep whose first trial has not begun yet has columns all the same.
        return pandas.DataFrame(rows, columns=results.column_names(rows, self.spec))

    def trial_rows(self) -> list[dict[str, Any]]:
        """The same as a list of mappings."""
        return results.rows(self._trials(), self.spec)

    def lineage(self) -> list[dict[str, Any]]:
        """The runs of all trials: trial, run_id, from (the run whose checkpoints it was given), why, status, values.

        A trial has several where the policy pauses it: `ASHA(promote=True)`, `PopulationBasedTraining`.
        """
        return results.lineage(self._trials(), self.spec)

    def best_children(self) -> list[Run]:
        """With several metrics the trials on the Pareto front, to which no other is better in all of them, the best by the first
        metric first; with one metric the best trial alone.
        """
        spec = self.spec
        best = results.best_trials(self._trials(), spec)
        return [Run(self._experiment, trial.best_leg(spec.goal).run_id) for trial in best]

    def best_child(self) -> Run | None:
        """The trial whose primary metric has been the best at any time, and of its runs the one that logged that; None where none
        has logged it.

        Raises:
            SweepError: the sweep has several metrics.
        """
        best = self._only_best("best_children()")
        return None if best is None else Run(self._experiment, best.best_leg(self.spec.goal).run_id)

    def best_point(self) -> dict[str, Any] | None:
        """The values of the best trial, name -> value.

        Raises:
            SweepError: the sweep has several metrics.
        """
        best = self._only_best("trial_rows()")
        return None if best is None else dict(best.best_leg(self.spec.goal).values)

    def draw(self, folder: str | os.PathLike[str]) -> list[str]:
        """Draw the sweep as it is now into a folder, which is made: history, parallel coordinates and importance as one HTML file
        without needs, and as PNG where matplotlib is installed; the paths. At its end they lie in the sweep's outputs.
        """
        trials = self._trials()
        return draw.into(Path(folder), draw.sketched(f"Sweep {self.id}", self.spec, trials))

    def more(self, trials: int) -> None:
        """Ask for so many more trials; a sweep that has ended goes on, with so many more than it has then. Its limits count anew.

        Raises:
            SweepError: no number of 1 or more.
        """
        more(self._folder, trials)

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
