"""Send the notifications of a live run in a thread, so that its supervisor or controller does not wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.runs.folder import RunFolder
from paceline.runs.record import RunRecord

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from paceline.job.notify import NotifyEvent


class Messenger:
    """A queue of a run's notifications, which a thread sends in order."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._pool: ThreadPoolExecutor | None = None
        self._sent: list[Future[list[str]]] = []

    def tell(self, record: RunRecord, event: NotifyEvent, digest: str = "") -> None:
        """Queue the messages of an event, if any receiver wants it (`paceline.runs.notify.tell`)."""
        if not any(event in events for events in record.receivers.values()):
            return
        # The imports are late, because they take a fifth of a supervisor's start, and few runs notify.
        from concurrent.futures import ThreadPoolExecutor

        from paceline.runs import notify

        self._pool = self._pool or ThreadPoolExecutor(1)
        self._sent.append(self._pool.submit(notify.tell, self._folder, record, event, digest))

    def wrong(self) -> list[str]:
        """Wait until all messages are sent. Return a sentence for each failure."""
        return [why for sent in self._sent for why in sent.result()]
