"""A sweep's table in a notebook: one output that is replaced as the sweep goes on, and stays in the saved notebook."""

from __future__ import annotations

import time
from html import escape

from paceline.runs import states
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord
from paceline.runs.visible import visible
from paceline.sweeps.live.board import Board, Standing
from paceline.sweeps.live.table import STATUS, Shown, shown

_PAUSE_S = 0.5
#: Rows; a notebook scrolls, and the saved file holds them.
_MOST = 30
_COLOURS = {states.COMPLETED: "green", states.FAILED: "firebrick", states.CANCELED: "darkorange"}


def to_the_end(folder: RunFolder) -> RunRecord:
    """Show the sweep until it has ended; its final record."""
    from IPython.display import HTML, display

    board = Board(folder)
    standing = board.look()
    handle = display(HTML(html_of(standing)), display_id=True)
    before = html_of(standing)
    while not standing.record.is_terminal:
        time.sleep(_PAUSE_S)
        standing = board.look()
        # Each update goes over the network to a browser, and into the saved notebook.
        if (now := html_of(standing)) != before:
            handle.update(HTML(now))
            before = now
    return standing.record


def html_of(standing: Standing) -> str:
    """The sweep's lines and table as HTML, all of it escaped."""
    return table_html(shown(standing, _MOST))


def table_html(seen: Shown) -> str:
    """`seen` as HTML, all of it escaped."""
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
