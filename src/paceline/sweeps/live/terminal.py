"""A sweep's table on a terminal, drawn over as the sweep goes on."""

from __future__ import annotations

import time
from typing import IO, TYPE_CHECKING

from paceline.runs import states
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord
from paceline.runs.visible import visible
from paceline.sweeps.live.board import Board
from paceline.sweeps.live.table import STATUS, Shown, shown

if TYPE_CHECKING:
    from rich.console import Group

#: Between two looks; longer where a look takes long, such as at a thousand trials at a time.
_PAUSE_S = 0.3
_SHARE = 4
#: Lines that the table's header, the line of what has no row, and the cursor take.
_FRAME_LINES = 4
_STYLES = {states.COMPLETED: "green", states.FAILED: "red", states.CANCELED: "yellow", states.RUNNING: "cyan"}


def to_the_end(folder: RunFolder, stream: IO[str], *, stays: bool = True) -> RunRecord:
    """Show the sweep until it has ended; its final record. stays: leave the last table on the screen."""
    from rich.console import Console
    from rich.live import Live

    board = Board(folder)
    console = Console(file=stream)
    # Refreshed by this loop alone: rich's own thread would draw the same table again.
    with Live(console=console, auto_refresh=False, transient=not stays) as live:
        while True:
            before = time.monotonic()
            standing = board.look()
            # Never more than the screen holds: what is drawn over must not have scrolled away.
            most = max(3, console.height - _FRAME_LINES - 2 * (2 + len(standing.record.warnings)))
            live.update(drawn(shown(standing, most)), refresh=True)
            if standing.record.is_terminal:
                return standing.record
            time.sleep(max(_PAUSE_S, _SHARE * (time.monotonic() - before)))


def drawn(seen: Shown) -> Group:
    """The lines and the table, in colours. Markup and control characters in other people's text are shown as they are."""
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
