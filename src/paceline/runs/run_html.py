"""A run as a notebook shows it: a small table of its name, state, times, folder and failure, all of it escaped."""

from __future__ import annotations

from html import escape

from paceline.errors import PacelineError
from paceline.runs import read, states, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.runs.follow import duration_text
from paceline.runs.record import RunRecord
from paceline.runs.visible import visible

_COLOURS = {states.COMPLETED: "green", states.FAILED: "firebrick", states.CANCELED: "darkorange"}


def run_html(folder: RunFolder) -> str:
    """HTML of the run as it is now; of one that is gone, that it is gone."""
    try:
        record = read.record(folder)
    except PacelineError as error:
        return f"<p>Run {escape(folder.run_id)}: {_text(str(error))}</p>"
    name = tags_and_properties.read(folder.notes).display_name
    rows = [
        ("Run", _text(f"{name} ({record.run_id})" if name else record.run_id)),
        ("Experiment", _text(record.experiment)),
        ("Status", _status(record)),
        ("Waits for", _text(record.waiting_for or "")),
        ("Folder", f'<a href="{escape(folder.path.absolute().as_uri())}">{_text(str(folder.path))}</a>'),
        ("Logs", f"<code>paceline logs -f {escape(record.run_id)}</code>" if record.kind == "script" else ""),
        ("Failure", f"<pre>{_text(str(record.failure))}</pre>" if record.failure else ""),
    ]
    cells = "".join(
        f'<tr><th style="text-align: left; vertical-align: top">{title}</th><td style="text-align: left">{text}</td></tr>'
        for title, text in rows
        if text
    )
    return f"<table>{cells}</table>"


def _status(record: RunRecord) -> str:
    colour = _COLOURS.get(record.status)
    status = f'<b style="color: {colour}">{record.status}</b>' if colour else f"<b>{_text(record.status)}</b>"
    if record.duration_s is None:
        return status
    return f"{status} {'in' if record.is_terminal else 'for'} {duration_text(record.duration_s)}"


def _text(text: str) -> str:
    # Escaping lets control characters through, and those that turn text around.
    return escape(visible(text, lines=True))
