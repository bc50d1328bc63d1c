"""Send a live run's notifications in a thread, so that its supervisor or controller does not wait."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from paceline.errors import JobError, QueryError
from paceline.job.notify import is_condition
from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord, seconds_of

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from paceline.runs.search.fields import RunField
    from paceline.runs.search.query import Node
    from paceline.runs.search.summaries import SummaryReader

#: Seconds between two checks whether metrics meet a condition on which receivers want a message.
_LOOK_S = 5.0


class Messenger:
    """A queue of a run's notifications, which a thread sends in order."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._pool: ThreadPoolExecutor | None = None
        self._sent: list[Future[list[str]]] = []

    def tell(self, record: RunRecord, event: str, digest: str = "") -> None:
        """Queue an event's notifications, with the text `digest`, for receivers that want them."""
        if not any(event in events for events in record.receivers.values()):
            return
        # Import these modules only now, because this takes a fifth of a supervisor's start time, and few runs have receivers.
        from concurrent.futures import ThreadPoolExecutor

        from paceline.runs import notify

        self._pool = self._pool or ThreadPoolExecutor(1)
        self._sent.append(self._pool.submit(notify.tell, self._folder, record, event, digest))

    def wrong(self) -> list[str]:
        """Wait until all messages are sent. Return a sentence for each failure."""
        return [why for sent in self._sent for why in sent.result()]


class MetricAlerts:
    """A sender of one notification for each metric condition in `notify_on`."""

    def __init__(self, folder: RunFolder, messenger: Messenger, notify_on: Iterable[str]) -> None:
        self._folder, self._messenger = folder, messenger
        self._waiting = list(filter(is_condition, notify_on))
        self._next_s = 0.0

    def look(self, record: RunRecord, *, is_last: bool = False) -> None:
        """Send notifications for conditions that the metrics now meet, at most every 5 s.

        is_last: Whether the run has ended. If so, test the conditions even less than 5 s after the last test.
        """
        if not self._waiting or (time.monotonic() < self._next_s and not is_last):
            return
        self._next_s = time.monotonic() + _LOOK_S
        from paceline.runs.search.facts import RunFacts
        from paceline.runs.search.fields import cell_text

        started, metrics = seconds_of(record.started_utc), self._reader.look()
        facts = RunFacts(run_id=record.run_id, started=started, metrics=metrics)
        for condition in list(self._waiting):
            node = parsed_alert(condition)
            if node.test(time.time())(facts):
                self._waiting.remove(condition)
                values = {field.name: cell_text(facts, field) for field in _fields(node) if field is not None}
                digest = "\n".join(f"{name} is {text}" for name, text in values.items())
                self._messenger.tell(record, condition, digest)

    @cached_property
    def _reader(self) -> SummaryReader:
        from paceline.runs.search.summaries import SummaryReader

        return SummaryReader(self._folder.metrics)


def parsed_alert(condition: str) -> Node:
    """Parse a condition of `notify_on`, such as "metrics.loss > 10", as a query.

    Raises:
        JobError: The text is not a query, or the query has other fields than metrics and duration.
    """
    from paceline.runs.search.query import parse

    try:
        node = parse(condition)
    except QueryError as error:
        raise JobError(f"notify_on: {error.pointed(condition)}") from None
    for field in _fields(node):
        if field is None or not (field.name == "duration" or field.name.startswith("metrics.")):
            name = "a word" if field is None else field.name
            raise JobError(
                f"notify_on={condition!r} has {name}. Compare metrics, such as metrics.loss > 10, or duration."
            )
    return node


def _fields(node: Node) -> Iterator[RunField | None]:
    """Yield the fields in a parsed query, and None for each search word."""
    from paceline.runs.search import query

    match node:
        case query.Word():
            yield None
        case query.Not():
            yield from _fields(node.node)
        case query.And() | query.Or():
            for part in node.nodes:
                yield from _fields(part)
        case _:
            yield node.field
