"""Live views of a sweep's trials: in a notebook, on a terminal, and as rows."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import IO, TYPE_CHECKING

from paceline.children import child
from paceline.runs import notebook as runs_notebook
from paceline.runs import states
from paceline.runs.folder import RunFolder
from paceline.runs.follow import RunWatch
from paceline.runs.record import RunRecord, duration_text
from paceline.runs.visible import visible
from paceline.sweeps.curves import Watch
from paceline.sweeps.policies.pausing import pausing
from paceline.sweeps.results import best_trial, best_trials, values_of
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.trial import SHOWN_PAUSED, Trial, ordered
from paceline.sweeps.trial_runs import all_runs, has_more, runs_of, trial_of
from paceline.system.units import value_text

if TYPE_CHECKING:
    from rich.console import Group


#: Index of the status column in `header` and `cells`.
STATUS = 1

_NOTEBOOK_PAUSE_S = 0.5
#: Maximum number of rows of the table in a notebook: the saved notebook contains all rows.
_MOST = 30
_COLOURS = {states.COMPLETED: "green", states.FAILED: "firebrick", states.CANCELED: "darkorange"}

#: Minimum pause between two updates in seconds.
_TERMINAL_PAUSE_S = 0.3
_SHARE = 4  # minimum ratio of the pause between two updates to the time that an update takes
#: Number of screen lines for the table's header, the line "and N more" and the cursor.
_FRAME_LINES = 4
_STYLES = {states.COMPLETED: "green", states.FAILED: "red", states.CANCELED: "yellow", states.RUNNING: "cyan"}


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A sweep's record, spec and trials as read at one moment."""

    record: RunRecord
    spec: SweepSpec
    trials: tuple[Trial, ...]


class Board:
    """A reader of a live sweep's record and trials, for any process.

    Raises:
        RunNotFoundError: The sweep does not exist.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._watch = RunWatch(folder)
        self._trials: list[Trial] = []
        self._live: dict[int, Watch] = {}

    def look(self) -> Standing:
        """Return the sweep's current record, spec and trials.

        The record is read before the trials, so the result for an ended sweep contains all its trials.
        """
        record = self._watch.look()
        spec = SweepSpec.from_json(record.sweep or {})
        may_go_on = pausing(spec.stop) is not None
        for number, watch in list(self._live.items()):
            self._trials[number] = trial = watch.look(self._trials[number])
            if trial.is_over:
                del self._live[number]
                if may_go_on:
                    # Read the ended trial again, because the tag of a paused trial is not read while the trial is live.
                    self._read_again(number, spec)
        if may_go_on:
            self._look_for_later_runs(spec, has_ended=record.is_terminal)
        for records in all_runs(self._folder, spec, len(self._trials)):
            trial = trial_of(records, self._folder.path.parent, spec)
            self._trials.append(trial)
            self._follow(trial, spec)
        return Standing(record=record, spec=spec, trials=tuple(self._trials))

    def _look_for_later_runs(self, spec: SweepSpec, *, has_ended: bool) -> None:
        for number, trial in enumerate(self._trials):
            # When a sweep ends, it tags the trials that are still paused as stopped. So read paused trials again after the end.
            if trial.is_over and (has_more(self._folder, trial) or (has_ended and trial.shown == SHOWN_PAUSED)):
                self._read_again(number, spec)

    def _read_again(self, number: int, spec: SweepSpec) -> None:
        if records := runs_of(self._folder, number):
            self._trials[number] = trial_of(records, self._folder.path.parent, spec)
            self._follow(self._trials[number], spec)

    def _follow(self, trial: Trial, spec: SweepSpec) -> None:
        if not trial.is_over:
            self._live[trial.number] = Watch(trial, self._folder.path.parent, spec)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A table of a sweep's trials with unescaped texts.

    Attributes:
        lines: Text above the table.
        rows: The cells of each row, in the order of `header`.
        more: Number of trials that have no row in the table.
    """

    lines: tuple[str, ...]
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    more: int = 0


def shown(standing: Standing, most: int) -> Shown:
    """Return a table of `most` trials: the best and some live trials."""
    spec = standing.spec
    order = ordered(standing.trials, spec.goals)
    # Use up to half of the rows for live trials.
    running = [trial for trial in order if not trial.is_over][: max(most // 2, most - len(order))]
    kept = {trial.number for trial in (*running, *order[: max(0, most - len(running))])}
    trials = [trial for trial in order if trial.number in kept][:most]
    names = parameters(standing.trials)
    return Shown(
        lines=lines(standing),
        header=header(names, spec),
        rows=tuple(cells(trial, names, spec) for trial in trials),
        more=len(order) - len(trials),
    )


def lines(standing: Standing) -> tuple[str, ...]:
    """Return the lines above the table: progress, the best trial, and warnings."""
    record, spec, trials = standing.record, standing.spec, standing.trials
    paused = sum(trial.shown == SHOWN_PAUSED for trial in trials)
    over = sum(trial.is_over for trial in trials) - paused
    failed = sum(trial.status == states.FAILED for trial in trials)
    stopped = sum(trial.shown == states.CANCELED for trial in trials)
    counts = {"failed": failed, "stopped": stopped, "paused": paused, "running": len(trials) - over - paused}
    parts = [f"{over} of {spec.trials} trials ended", *(f"{count} {word}" for word, count in counts.items() if count)]
    during = "in" if record.is_terminal else "for"
    took = f" {during} {duration_text(record.duration_s)}" if record.duration_s is not None else ""
    texts = [f"Sweep {record.run_id} is {record.status}{took}: {', '.join(parts)}"]
    if (best := best_trial(trials, spec)) is not None:
        if spec.further:
            numbers = [str(trial.number) for trial in best_trials(trials, spec)]
            texts.append(f"Pareto front: trial{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}")
        else:
            texts.append(f"Best: trial {best.number}, {spec.metric} {value_text(best.best(spec.goal))}{_said(best)}")
    texts += [f"Warning: {text}" for text in record.warnings]
    if record.failure is not None:
        texts.append(record.failure.message)
        texts += [f"More: {record.failure.see}"] if record.failure.see else []
    return tuple(texts)


def parameters(trials: Sequence[Trial]) -> list[str]:
    """Return the names of the trials' hyperparameters, in order of appearance."""
    return list(dict.fromkeys(name for trial in trials for name in trial.values))


def header(names: Sequence[str], spec: SweepSpec) -> tuple[str, ...]:
    return ("TRIAL", "STATUS", *spec.metrics, "VALUES", "TIME", *(name.lstrip("-") for name in names))


def cells(trial: Trial, names: Sequence[str], spec: SweepSpec) -> tuple[str, ...]:
    """Return a trial's row in the table; "-" stands for a missing hyperparameter."""
    took = trial.duration_s
    return (
        str(trial.number),
        trial.shown,
        *map(value_text, values_of(trial, spec)),
        str(len(trial.curve)),
        duration_text(took) if took is not None else "-",
        *(value_text(trial.values.get(name)) for name in names),
    )


def _said(trial: Trial) -> str:
    values = ", ".join(f"{name.lstrip('-')} {value_text(value)}" for name, value in trial.values.items())
    return f" with {values}" if values else ""


def follow_in_notebook(folder: RunFolder) -> RunRecord:
    """Show the sweep in a notebook cell until it ends. Return its record."""
    from IPython.display import HTML, display

    board = Board(folder)
    standing = board.look()
    handle = display(HTML(html_of(standing)), display_id=True)
    before = html_of(standing)
    while not standing.record.is_terminal:
        time.sleep(_NOTEBOOK_PAUSE_S)
        standing = board.look()
        # Send only changes, because each update is sent over the network and saved in the notebook.
        if (now := html_of(standing)) != before:
            handle.update(HTML(now))
            before = now
    return standing.record


def html_of(standing: Standing) -> str:
    """Return the sweep's progress and trials as escaped HTML."""
    return table_html(shown(standing, _MOST))


def table_html(seen: Shown) -> str:
    """Return the table of trials as escaped HTML."""
    head = "".join(f"<th>{_text(name)}</th>" for name in seen.header)
    rows = "".join(f"<tr>{''.join(_cell(*cell) for cell in enumerate(row))}</tr>" for row in seen.rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>" if seen.rows else ""
    more = f"<div>and {seen.more} more</div>" if seen.more else ""
    return "".join(f"<div>{_text(line)}</div>" for line in seen.lines) + table + more


def _cell(column: int, text: str) -> str:
    colour = _COLOURS.get(text) if column == STATUS else None
    return f'<td style="color: {colour}">{text}</td>' if colour else f"<td>{_text(text)}</td>"


def _text(text: str) -> str:
    return escape(visible(text))


def follow_on_terminal(folder: RunFolder, stream: IO[str], *, stays: bool = True) -> RunRecord:
    """Show the sweep on a terminal until it has ended. Return its record."""
    from rich.console import Console
    from rich.live import Live

    board = Board(folder)
    console = Console(file=stream)
    # Disable rich's refresh thread, which would draw the same table again.
    with Live(console=console, auto_refresh=False, transient=not stays) as live:
        while True:
            before = time.monotonic()
            standing = board.look()
            # Draw at most one screen, because lines that have scrolled away cannot be redrawn.
            most = max(3, console.height - _FRAME_LINES - 2 * (2 + len(standing.record.warnings)))
            live.update(drawn(shown(standing, most)), refresh=True)
            if standing.record.is_terminal:
                return standing.record
            time.sleep(max(_TERMINAL_PAUSE_S, _SHARE * (time.monotonic() - before)))


def drawn(seen: Shown) -> Group:
    """Return the table of trials in colours for a terminal, with untrusted text escaped."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in seen.header:
        table.add_column(Text(visible(name)), no_wrap=True, overflow="ellipsis")
    for row in seen.rows:
        table.add_row(
            *(
                Text(visible(cell), style=_STYLES.get(cell, "") if column == STATUS else "")
                for column, cell in enumerate(row)
            )
        )
    texts = [Text(visible(line)) for line in seen.lines]
    return Group(*texts, *([table] if seen.rows else []), *([Text(f"and {seen.more} more")] if seen.more else []))


def follow(folder: RunFolder, stream: IO[str], line: Callable[[str], None], *, stays: bool = True) -> RunRecord:
    """Show the sweep's progress until its end, and return its record.

    A notebook or terminal shows a live table of trials. Otherwise, `line` gets the log of the sweep's controller.

    `line`: Called for each line of the log.
    `stays`: Whether the last table stays on the terminal.
    """
    if runs_notebook.is_here():
        return follow_in_notebook(folder)
    # Show a live table, except on a terminal that can't redraw lines, such as an editor's with TERM=dumb.
    if stream.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown", ""):
        return follow_on_terminal(folder, stream, stays=stays)
    return child.follow_log(folder, line)


def way_back(folder: RunFolder) -> str:
    """Return a message with the commands that show and end the sweep."""
    return (
        f"Sweep {folder.run_id} goes on. See it again: paceline sweep show -f {folder.run_id}\n"
        f"End it: paceline sweep stop {folder.run_id}"
    )
