"""A terminal's view of a run: its lines on standard output, messages on standard error."""

from __future__ import annotations

import sys

from paceline.cli.common import WARNING_COLOUR, coloured, has_colour, rank_colour, state_colour
from paceline.runs import excluded_files, states
from paceline.runs.artifacts import names
from paceline.runs.folder import RunFolder
from paceline.runs.follow import attempt_text, node_prefix, prefix, state_text
from paceline.runs.logs import LogLine
from paceline.runs.record import Attempt, RunRecord, end_text
from paceline.runs.visible import TerminalLines, visible, visible_line
from paceline.system.names import some


class RunView:
    """A printer of a run's output and changes of state.

    On a terminal, the next line overwrites an unfinished line (a progress bar). Except with `raw`, control sequences other than
    colours are removed there. Files and pipes get lines unchanged. `world_size` is 0 if only one rank's lines are shown.
    """

    def __init__(
        self, world_size: int, *, quiet: bool = False, attempts: int = 1, nodes: int = 1, raw: bool = False
    ) -> None:
        self._size = world_size
        self._nodes = nodes
        self._attempts = attempts
        self._quiet = quiet
        self._terminal = sys.stdout.isatty()
        self._colour = has_colour(sys.stdout)
        self._open_line = False
        # On a terminal, remove control codes from the script's output, which could move the cursor or set the title.
        self._lines = TerminalLines() if self._terminal and not raw else None

    def line(self, line: LogLine) -> None:
        if self._size:
            self._size = max(self._size, line.rank + 1)  # widen the prefix if the script has started more ranks
        text = line.text if self._lines is None else self._lines.line(line.rank, line.text)
        if before := coloured(prefix(line, self._size, self._attempts), rank_colour(line.rank), self._colour):
            # The log of an ended run comes in blocks of several lines. Put the prefix before each line of the block.
            text = before + text.replace("\n", f"\n{before}")
        # A progress bar has no line end. Overwrite the bar.
        if self._open_line:
            sys.stdout.write("\r\x1b[2K")
        self._open_line = self._terminal and not line.complete
        sys.stdout.write(text if self._open_line else f"{text}\n")
        sys.stdout.flush()

    def state(self, record: RunRecord) -> None:
        # Don't print the states NOT_STARTED and FINALIZING, because they last only a moment.
        if record.waiting_for or record.status not in (states.NOT_STARTED, states.FINALIZING):
            self.say(coloured(visible(state_text(record)), state_colour(record.status), has_colour(sys.stderr)))

    def attempt(self, before: Attempt, now: Attempt) -> None:
        self.say(attempt_text(before, now))

    def note(self, line: LogLine) -> None:
        """Print a line from the preparation of a node on standard error."""
        if self._quiet:
            return
        text = node_prefix(line, self._nodes) + visible_line(line.text)
        # Clear the line first, because it may hold an unfinished progress bar.
        if sys.stderr.isatty():
            print(f"\r\x1b[2K{text}", end="\n" if line.complete else "", file=sys.stderr, flush=True)
        elif line.complete:
            print(text, file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Print a message on standard error."""
        if self._open_line:
            # The script's line on standard output is unfinished. End it first, because a terminal shows both streams.
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._open_line = False
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)


def print_end(folder: RunFolder, record: RunRecord, view: RunView) -> None:
    """Print how the run has ended, and which command shows more."""
    colour = has_colour(sys.stderr)
    view.say(coloured(visible(end_text(record)), state_colour(record.status), colour))
    for warning in record.warnings:
        view.say(coloured(f"Warning: {visible(warning, lines=True)}", WARNING_COLOUR, colour))
    # Print the cause of a failure even with --quiet. Don't use `say`, which prints nothing then.
    if record.failure is not None:
        print(f"\n{visible(str(record.failure), lines=True)}", file=sys.stderr)
    outputs = [name for name in names(folder) if name.startswith("outputs/")]
    if outputs:
        view.say(f"Outputs in {folder.outputs}: {visible(some(outputs, 5))}")
    for text in excluded_files.lines(record):
        view.say(f"Left out: {visible(text)}")
    if folder.uploads.is_dir() and (unstored := sorted(path.name for path in folder.uploads.iterdir())):
        view.say(f"Not stored, and kept in {folder.uploads}: {', '.join(unstored)}")
    if folder.work.is_dir():
        # `work_dir.clean` has removed the snapshot's files from this folder. The remaining files were written by the script.
        left = sorted(visible(path.name) for path in folder.work.iterdir())
        view.say(f"The script also left in {folder.work}: {', '.join(left[:5])}{', ...' if len(left) > 5 else ''}")
