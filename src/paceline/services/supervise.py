"""Supervise one service: start, update, restart and stop its server.

Each tick does one non-blocking step, so requested changes, crashes and finished builds are all noticed:

    change ─── prepare the environment ── server runs? ── yes: new configuration, SIGHUP ── ready or refused ── settled
                                                    └── no: start it ─────────────────── ready or ended ───── settled

A server loads a new revision while it serves the old one, and continues with the old one if loading fails. So one
server has the socket all the time, and clients notice nothing.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.errors import PacelineError
from paceline.runs import store as runs_store
from paceline.runs.claim import Claim
from paceline.runs.driver_log import say
from paceline.runs.record import parse_utc
from paceline.services import keys, store
from paceline.services.folder import ServiceFolder
from paceline.services.load import LoadHistory
from paceline.services.log import shorten
from paceline.services.prepare import Preparation
from paceline.services.record import (
    FAILED,
    GONE,
    HEALTHY,
    STOPPED,
    TRANSITIONING,
    UNHEALTHY,
    UP,
    DesiredState,
    Revision,
)
from paceline.services.remote_server import RemoteServer
from paceline.services.server import Server
from paceline.supervisor.supervision import Wake
from paceline.system import processes
from paceline.system.files import remove_tree
from paceline.targets import configured

if TYPE_CHECKING:
    from paceline.services.cluster_server import ClusterServer

_PAUSE_S = 0.2
_PAUSE_WHILE_CHANGING_S = 0.03
#: Seconds to wait before each restart of a server that dies repeatedly. The last value repeats.
_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
#: Seconds for which a server has to answer requests until its earlier deaths no longer count.
_STEADY_S = 60.0
_SHORTEN_S = 30.0
#: A service counts as down after so many deaths of its server in a row, or so many seconds without an answer after a death.
_MOST_DEATHS, _DOWN_S = 3, 60.0


@dataclass
class _Change:
    """An update in preparation: a revision that is not served yet.

    serial: Serial of the requested change (`DesiredState`). None if the revision was served before and only restarts.
    """

    revision: Revision
    workers: int
    serial: int | None
    preparation: Preparation
    is_told: bool = False
    tag: str = ""


class Supervisor:
    """The supervisor of one service. The caller holds the service's lock."""

    def __init__(self, folder: ServiceFolder, listener: socket.socket, claim: Claim) -> None:
        self.folder = folder
        self.wake = Wake()
        self.wake.check = claim.check
        self.change: _Change | None = None
        #: The prepared environment of the served revision. It stays locked, so that it is not pruned.
        self.serving: Preparation | None = None
        self.deaths = 0
        self.tags = 0
        #: Tag of the served configuration: the revision's number, a dot and a counter.
        self.tag = ""
        self.ready_s: float | None = None
        self.next_start_s = 0.0
        self.next_shorten_s = 0.0
        self.history = LoadHistory(folder)
        self.keys_time = keys.changed_ns(self.folder)
        record = store.stored(folder)
        self.server: Server | RemoteServer | ClusterServer = _server(folder, listener, record.target)
        self.record = store.change(
            folder,
            record,
            # This process holds the service's lock, so an earlier supervisor and its server have ended.
            state=TRANSITIONING if record.revision is None else UNHEALTHY,
            owner={**runs_store.owner(), "python": sys.executable},
            port=listener.getsockname()[1],
            updating=None,
            server_pid=None,
        )

    def run(self) -> None:
        """Run until a user stops the service, or its first start fails."""
        while True:
            target = store.desired(self.folder)
            if target.state != UP or self.wake.stopped_by is not None:
                return self._end(target)
            self._look(target)
            if self.record.state == FAILED and self.record.settled == store.desired(self.folder).serial:
                return self._close()
            self._tell_if_down()
            self._tidy()
            self.wake.sleep(_PAUSE_S if self.change is None else _PAUSE_WHILE_CHANGING_S)

    def _look(self, target: DesiredState) -> None:
        if self.server.is_up and (how := self.server.ended()) is not None:
            self._died(how)
        if self.change is not None:
            # Drop the update if a user has requested a newer change while the update's environment is still being built.
            if not self.change.is_told and self.change.serial not in (None, target.serial):
                self._drop()
            else:
                self._go_on()
            return
        if not self.server.is_up:
            if time.monotonic() >= self.next_start_s:
                self._begin_start(target)
        elif target.serial != self.record.settled:
            self._begin(target.revision, target.workers, target.serial)
        else:
            self._watch()

    def _begin_start(self, target: DesiredState) -> None:
        known = self.record.revision
        is_new = target.serial != self.record.settled
        if known is None or (is_new and self.deaths % 2):
            self._begin(target.revision, target.workers, target.serial)
        else:
            self._begin(known, self.record.workers or 1, None)

    def _begin(self, number: int, workers: int, serial: int | None) -> None:
        try:
            revision = store.revision(self.folder, number)
        except PacelineError as error:
            return self._settle_failed(serial, str(error))
        say(f"revision {number} with {workers} workers is being prepared: {', '.join(revision.model_names)}")
        if serial is not None:
            self._note(updating=number)
        self.change = _Change(
            revision,
            workers,
            serial,
            Preparation(self.folder, revision, is_here=self.record.target == configured.LOCAL),
        )

    def _go_on(self) -> None:
        change = self.change
        assert change is not None
        if not change.is_told:
            if not change.preparation.poll():
                return
            if change.preparation.failure is not None:
                return self._failed(change.preparation.failure)
            self._tell(change)
        elif self.server.is_ready(change.tag):
            self._served(change)
        elif (reason := self.server.refusal(change.tag)) is not None:
            self._failed(reason)
            # Restore the served revision's configuration file, which the next reload reads.
            self._restore()

    def _tell(self, change: _Change) -> None:
        self.tags += 1
        change.tag, change.is_told = f"{change.revision.number}.{self.tags}", True
        assert change.preparation.setup is not None
        what = (change.tag, self.record, change.revision, change.workers, change.preparation.setup)
        try:
            if not self.server.is_up:
                self.server.start(*what)
                self._note(server_pid=self.server.pid)
            else:
                self.server.change(*what)
        except (PacelineError, OSError) as error:
            self._failed(str(error))

    def _served(self, change: _Change) -> None:
        if self.serving is not None:
            self.serving.stop()
        self.change, self.serving, self.tag = None, change.preparation, change.tag
        number = change.revision.number
        say(f"revision {number} is served at {self.record.url}")
        self.ready_s = time.monotonic()
        self._note(
            state=HEALTHY,
            revision=number,
            workers=change.workers,
            served=tuple(sorted({*self.record.served, number})),
            settled=self.record.settled if change.serial is None else change.serial,
            failure=None,
            updating=None,
            run_id=self.server.run_id,
            note=self.server.note,
        )

    def _failed(self, reason: str) -> None:
        change = self.change
        assert change is not None
        self._drop()
        say(f"revision {change.revision.number} can't be served: {reason}")
        if not self.server.is_up:
            self._wait_longer()
        self._settle_failed(change.serial, reason)

    def _settle_failed(self, serial: int | None, reason: str) -> None:
        without = FAILED if self.record.revision is None else UNHEALTHY
        state = self.record.state if self.server.is_up else without
        settled = self.record.settled if serial is None else serial
        self._note(state=state, settled=settled, failure=reason, updating=None)

    def _restore(self) -> None:
        if self.serving is None or self.serving.setup is None or self.record.revision is None:
            return
        revision = store.revision(self.folder, self.record.revision)
        self.server.keep(self.tag, self.record, revision, self.record.workers or 1, self.serving.setup)

    def _note(self, **changes: object) -> None:
        self.record = store.change(self.folder, self.record, **changes)

    def _drop(self) -> None:
        change, self.change = self.change, None
        if change is not None:
            change.preparation.stop()

    def _died(self, how: str) -> None:
        say(how)
        self.server.clear()
        if self.ready_s is not None and time.monotonic() - self.ready_s > _STEADY_S:
            self.deaths = 0
        self.ready_s = None
        if self.change is not None and self.change.is_told:
            self._failed(how)
        else:
            self._wait_longer()
        self._note(
            server_pid=None,
            state=FAILED if self.record.revision is None else UNHEALTHY,
            restarts=self.record.restarts + (self.record.revision is not None),
            last_end=how,
        )

    def _wait_longer(self) -> None:
        self.next_start_s = time.monotonic() + _BACKOFF_S[min(self.deaths, len(_BACKOFF_S) - 1)]
        self.deaths += 1

    def _watch(self) -> None:
        state = HEALTHY if self.server.answers else UNHEALTHY
        if state == HEALTHY:
            self.history.look(self.record)
        if state != self.record.state:
            self._note(state=state)
        if (changed := keys.changed_ns(self.folder)) != self.keys_time:
            self.keys_time = changed
            if self.server.takes_keys:
                self.server.reload()
            elif self.record.revision is not None:
                self._begin(self.record.revision, self.record.workers or 1, None)

    def _tell_if_down(self) -> None:
        since_s = time.time() - parse_utc(self.record.since_utc).timestamp()
        if self.record.state == HEALTHY and self.record.outage_reported and since_s > _STEADY_S:
            self._note(outage_reported=False)
        is_down = self.record.state == UNHEALTHY and self.deaths and (self.deaths >= _MOST_DEATHS or since_s > _DOWN_S)
        if is_down and not self.record.outage_reported:
            self._note(outage_reported=True)
            # Send the messages in a thread, so that this thread can restart the server without waiting.
            threading.Thread(target=store.tell_down, args=(self.folder, self.record)).start()

    def _tidy(self) -> None:
        # Reap only adopted orphans: `server` and `preparation` reap the processes that they have started.
        own = {*self.server.pids, self.change.preparation.pid if self.change is not None else None}
        while (pid := processes.ended_child()) is not None and pid not in own:
            os.waitpid(pid, 0)
        if time.monotonic() >= self.next_shorten_s:
            self.next_shorten_s = time.monotonic() + _SHORTEN_S
            shorten(self.folder)

    def _end(self, target: DesiredState) -> None:
        say(f"the service ends: {'asked by ' + (target.by or '?') if target.state != UP else 'by a signal'}")
        self._close(keeps_up=target.state == UP)
        if target.state == GONE:
            remove_tree(self.folder.path)
        elif target.state != UP:
            self._note(state=STOPPED, settled=target.serial, failure=None, server_pid=None)

    def _close(self, *, keeps_up: bool = False) -> None:
        """Stop the server. With `keeps_up`, leave a remote server to the next supervisor."""
        self._drop()
        if keeps_up:
            self.server.leave()
        else:
            self.server.stop()
        self.history.close()
        if self.serving is not None:
            self.serving.stop()
        self._note(server_pid=None)


def _server(folder: ServiceFolder, listener: socket.socket, target: str) -> Server | RemoteServer | ClusterServer:
    if target == configured.LOCAL:
        return Server(folder, listener)
    if folder.cluster.exists() or configured.read(folder.workspace_dir, target).kind == "kubernetes":
        from paceline.services.cluster_server import ClusterServer  # slow to load, and needs further packages

        return ClusterServer(folder, listener, target)
    return RemoteServer(folder, listener, target)


def run(folder: ServiceFolder, listener: socket.socket, claim: Claim) -> None:
    """Supervise a service until it is stopped or has failed. The caller holds its lock."""
    Supervisor(folder, listener, claim).run()
