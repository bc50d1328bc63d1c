"""The display of a run in a notebook: one output that is updated and saved.

The module uses IPython's display handle. A widget would need a library, and would lose its state when the kernel ends.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from html import escape

from paceline.errors import PacelineError
from paceline.runs import read, states, tags_and_properties
from paceline.runs.folder import RunFolder, metric_logs
from paceline.runs.metric_reader import MetricEntry, last_entries
from paceline.runs.record import RunRecord, duration_text, hang_status
from paceline.runs.visible import visible

#: Seconds between two updates of a display. Each update is sent to the browser, and stored in the notebook.
_PAUSE_S = 0.5

#: A display shows at most _MOST metrics, and at most _LONGEST characters of a metric's value.
_MOST, _LONGEST = 12, 40
_END_BYTES = 1 << 16
_COLOURS = {states.COMPLETED: "green", states.FAILED: "firebrick", states.CANCELED: "darkorange"}


def is_here() -> bool:
    """Return whether this program is a notebook's kernel, which has imported IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    # Without a kernel, IPython runs in a terminal, which shows HTML as `<IPython.core.display.HTML object>`.
    return getattr(shell, "kernel", None) is not None


def show(html: Callable[[], str], is_over: Callable[[], bool]) -> threading.Thread:
    """Display the HTML that `html` returns. Start and return a thread that updates it.

    The thread ends once `is_over` returns True, or when the program ends.
    """
    from IPython.display import HTML, display

    before = html()
    handle = display(HTML(before), display_id=True)

    def follow() -> None:
        last, over = before, False
        while not over:
            # Check for the end before reading the state, so that the last display shows the final state.
            over = is_over()
            now = html()
            if now != last:
                handle.update(HTML(now))
                last = now
            if not over:
                time.sleep(_PAUSE_S)

    thread = threading.Thread(target=follow, name="paceline-notebook", daemon=True)
    thread.start()
    return thread


def run_html(folder: RunFolder) -> str:
    """Return the run's current state, or why it can't be read, as HTML."""
    try:
        record = read.record(folder)
    except PacelineError as error:
        return f"<p>Run {escape(folder.run_id)}: {_text(str(error))}</p>"
    name = tags_and_properties.read(folder.notes).name
    rows = [
        ("Run", _text(f"{name} ({record.run_id})" if name else record.run_id)),
        ("Experiment", _text(record.experiment)),
        ("Status", _status(record)),
        ("Waits for", _text(record.waiting_for or "")),
        ("Hang", _text(str(record.hang["text"])) if record.hang and hang_status(record) != record.status else ""),
        ("Folder", f'<a href="{escape(folder.path.absolute().as_uri())}">{_text(str(folder.path))}</a>'),
        ("Logs", f"<code>paceline logs -f {escape(record.run_id)}</code>" if record.kind == "script" else ""),
        ("Metrics", _metrics(folder)),
        ("Failure", f'<pre style="white-space:pre-wrap">{_text(str(record.failure))}</pre>' if record.failure else ""),
    ]
    cells = "".join(
        f'<tr><th style="text-align: left; vertical-align: top">{title}</th><td style="text-align: left">{text}</td></tr>'
        for title, text in rows
        if text
    )
    return f"<table>{cells}</table>"


def latest_metrics(folder: RunFolder) -> dict[str, MetricEntry]:
    """Return each metric's last entry from the lowest rank that logged it."""
    found: dict[str, MetricEntry] = {}
    for attempts in metric_logs(folder.metrics).values():
        entries = last_entries(attempts[max(attempts)], _END_BYTES)
        found = {**{entry["name"]: entry for entry in entries}, **found}
    return found


def _metrics(folder: RunFolder) -> str:
    found, lines = latest_metrics(folder), []
    for name, entry in list(found.items())[:_MOST]:
        value, step = entry.get("value"), entry.get("step")
        last = f"{value:.6g}" if isinstance(value, float) else str(value)[:_LONGEST]
        lines.append(f"{_text(name)}: {_text(last)}{'' if step is None else f' at step {step}'}")
    if len(found) > _MOST:
        lines.append(f"and {len(found) - _MOST} more")
    return "<br>".join(lines)


def _status(record: RunRecord) -> str:
    colour = _COLOURS.get(record.status)
    status = f'<b style="color: {colour}">{record.status}</b>' if colour else f"<b>{_text(record.status)}</b>"
    if record.duration_s is None:
        return status
    return f"{status} {'in' if record.is_terminal else 'for'} {duration_text(record.duration_s)}"


def _text(text: str) -> str:
    # Call `visible` as well, because escaping for HTML leaves control characters and bidirectional formatting unchanged.
    return escape(visible(text, lines=True))
