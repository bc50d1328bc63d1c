"""The rows of the list of runs as HTML: of a run that has ended the text is kept, for it is asked for again and again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from paceline.ui import render
from paceline.ui.index import IndexEntry
from paceline.ui.latest import LatestValues

#: Rows that are kept, of about a kilobyte each; a page has a hundred.
_MOST = 2000


class RunRows:
    def __init__(self, latest: LatestValues) -> None:
        self._latest = latest
        self._known: dict[str, tuple[Any, Markup]] = {}

    def of(self, entries: Sequence[IndexEntry], root: str) -> dict[str, Markup]:
        """Run id -> its row. root: the way to the top of the page."""
        values = self._latest.of(entries)
        return {entry.run_id: self._row(entry, root, values) for entry in entries}

    def _row(self, entry: IndexEntry, root: str, values: dict[str, Any]) -> Markup:
        shown = (root, entry.record_stamp, entry.notes_stamp, values[entry.run_id])
        known = self._known.get(entry.run_id)
        if known is None or known[0] != shown or not entry.is_terminal:
            if len(self._known) >= _MOST:
                self._known.clear()
            # Jinja has escaped what is in it.
            row = Markup(render.part("run_row.html", run=entry, root=root, latest=values))
            known = self._known[entry.run_id] = (shown, row)
        return known[1]
