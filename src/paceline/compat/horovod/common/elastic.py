"""State that survives a failed collective, and the loop that restores it."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from paceline.collectives.errors import CollectivesError
from paceline.collectives.numbers import Array
from paceline.compat.horovod.common import basics, objects
from paceline.compat.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from paceline.compat.horovod.common.kept_commits import KeptCommits, base_of
from paceline.compat.horovod.common.types import KeptState
from paceline.system import run_variables

T = TypeVar("T")

_log = logging.getLogger(__name__)
#: Values for `on_hosts_updated`: no change, hosts added, hosts removed, both.
NO_UPDATE, ADDED, REMOVED, MIXED = range(4)
#: So often is a state restored without a commit in between before the error is raised. A guess.
_RESTORES_WITHOUT_COMMIT = 10


class Kept:
    """Base class of values that can be saved and restored."""

    def save(self) -> None:
        """Remember the present values."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to the saved values."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give every rank the first rank's values."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to another number of ranks; a subclass may override it."""


class State(Kept):
    """The state of a training script between batches.

    `bcast_object` gives every rank the first rank's object, and `get_rank` returns this process's rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        # Another thread may call `on_hosts_updated`: append and pop are atomic.
        self._updates: list[tuple[float, int]] = []
        self._last_update: float = 0
        self._reset_callbacks: list[Callable[[], object]] = []
        self._commits = 0
        #: Where commits outlive this process, while `run` has the state.
        self._kept_commits: KeptCommits | None = None

    def register_reset_callbacks(self, callbacks: list[Callable[[], object]]) -> None:
        """Call these after each restart of the engine."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Handle a restart of the engine."""
        # Earlier notifications are out of date, as the engine begins with the present hosts.
        self._updates.clear()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = MIXED) -> None:
        """Note that hosts came or went; `check_host_updates` acts on it."""
        self._updates.append((timestamp, update_res))

    def commit(self) -> None:
        """Save, then check for host changes. All ranks call it equally often.

        Raises:
            HostsUpdatedInterrupt: The hosts have changed.
        """
        # Save before the check, which may leave the loop: the work so far is then safe.
        self.save()
        self._commits += 1
        self._keep()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Check whether the first rank knows of host changes.

        Raises:
            HostsUpdatedInterrupt: The hosts have changed; on every rank.
        """
        if run_variables.is_resize_requested():
            self.on_hosts_updated(time.time(), MIXED)
        last, seen = self._last_update, NO_UPDATE
        while self._updates:
            timestamp, update = self._updates.pop(0)
            if timestamp > last:
                last, seen = timestamp, seen | update
        # The first rank decides for all, and each rank asks every time. If each acted on its own notifications, some would
        # leave a batch earlier, and the others would wait for them in the next collective.
        before, self._last_update, everything = self._bcast_object((self._last_update, last, seen))
        if self._last_update > before:
            raise HostsUpdatedInterrupt(everything == REMOVED)

    def kept(self) -> KeptState | None:
        """Return the saved values, or None if a subclass cannot."""
        return None

    def take_kept(self, kept: KeptState) -> None:
        """Take the saved values of another process."""
        raise NotImplementedError

    def _keep(self) -> None:
        if self._kept_commits is not None and (kept := self.kept()) is not None:
            self._kept_commits.save(kept)


class ObjectState(State):
    """Plain values, each an attribute. They are not copied."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: object) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set_attrs()

    def save(self) -> None:
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attrs()

    def sync(self) -> None:
        # The ranks make their states of the same values, so all of them are without.
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attrs()

    def kept(self) -> KeptState | None:
        return {"values": self._saved_state}

    def take_kept(self, kept: KeptState) -> None:
        # What the script has now and had not then, or could not be kept, stays as the script has made it.
        self._saved_state |= {name: value for name, value in kept["values"].items() if name in self._saved_state}

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


class VariablesState(ObjectState):
    """Variables of a framework, and plain values."""

    def __init__(self, **kwargs: object) -> None:
        super().__init__(from_first, basics.rank, **kwargs)
        self._saved_variables = self._read()

    def save(self) -> None:
        self._saved_variables = self._read()
        super().save()

    def restore(self) -> None:
        self._write(self._saved_variables)
        super().restore()

    def sync(self) -> None:
        self._spread()
        self._saved_variables = self._read()
        super().sync()

    def kept(self) -> KeptState | None:
        return {"values": self._saved_state, "variables": self._saved_variables}

    def take_kept(self, kept: KeptState) -> None:
        self._saved_variables = kept["variables"]
        super().take_kept(kept)

    def _read(self) -> list[Array]:
        """Return copies of the variables' values."""
        raise NotImplementedError

    def _write(self, values: list[Array]) -> None:
        """Set the variables to these values."""
        raise NotImplementedError

    def _spread(self) -> None:
        """Give every rank's variables the first rank's values."""
        raise NotImplementedError


class Listener(Protocol):
    def on_hosts_updated(self, timestamp: float, update_res: int) -> None: ...


class NotificationManager:
    """Listeners for host changes, called by `handle_hosts_updated`."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def init(self) -> None:
        """Do nothing: no service announces host changes."""

    def register_listener(self, listener: Listener) -> None:
        if listener not in self._listeners:
            self._listeners.append(listener)

    def remove_listener(self, listener: Listener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    def handle_hosts_updated(self, timestamp: float | None = None, update_res: int = MIXED) -> None:
        for listener in self._listeners:
            listener.on_hosts_updated(time.time() if timestamp is None else timestamp, update_res)


notification_manager = NotificationManager()


def from_first(value: T) -> T:
    """Return the first rank's value on every rank."""
    first: T = objects.broadcast_object(value, name="elastic_state")
    return first


def run(func: Callable[..., T]) -> Callable[..., T]:
    """Make `func(state, ...)` restart from the last commit.

    It starts from the first rank's state, and the engine restarts each time.
    """
    return run_fn(func, _restart)


def run_fn(func: Callable[..., T], reset: Callable[[], object]) -> Callable[..., T]:
    """Make `func` restart from the last commit after `reset`."""

    @functools.wraps(func)
    def wrapper(state: State, *args: object, **kwargs: object) -> T:
        notification_manager.init()
        notification_manager.register_listener(state)
        is_new, skip_sync, restores, commits = True, False, 0, state._commits
        last: Exception | None = None
        base = base_of()
        state._kept_commits = None if base is None else KeptCommits(base)
        try:
            if state._kept_commits is not None:
                _go_on(state, state._kept_commits)
            while True:
                try:
                    # In the first round the engine runs already, started by the script's own `init`.
                    if not is_new:
                        # The engine first: `on_reset` asks it how many ranks there are now, and `sync` sends by it.
                        _reset(reset, last)
                        state.on_reset()
                    if not skip_sync:
                        state.sync()
                    return func(state, *args, **kwargs)
                except HorovodInternalError as error:
                    # Only restores in a row are counted: a commit in between is progress.
                    restores = 1 if state._commits > commits else restores + 1
                    commits = state._commits
                    if restores > _RESTORES_WITHOUT_COMMIT:
                        raise
                    _log.warning("a collective has failed; going back to the last commit: %s", error)
                    # This rank restores its own commit; `sync`, after the reset, makes all ranks equal again.
                    state.restore()
                    skip_sync, last = False, error
                except HostsUpdatedInterrupt as change:
                    if run_variables.REQUEST_VARIABLE in os.environ:
                        _leave(state)
                    skip_sync, last = change.skip_sync, change
                is_new = False
        finally:
            notification_manager.remove_listener(state)
            state._kept_commits = None

    return wrapper


def _go_on(state: State, commits: KeptCommits) -> None:
    """Load the last commit of an earlier attempt."""
    kept = commits.load() if state._rank() == 0 else None
    if kept is not None:
        state.take_kept(kept)
        state.restore()
    # All ranks count on from there, and adapt to how many they are now.
    has_commit, commits.number = state._bcast_object((kept is not None, commits.number))
    if has_commit:
        # First: in Horovod, whose processes go on, all ranks have the committed state when the callbacks look at it.
        state.sync()
        state.on_reset()


def _leave(state: State) -> None:
    """Save the present state and end this process."""
    if state._kept_commits is None:
        return
    # The script may have checked the hosts without a commit; its work since the last one must count.
    state.save()
    state._keep()
    # No rank leaves before all have written: the first one that leaves ends the others.
    objects.allgather_object(None, name="elastic_kept")
    raise SystemExit(run_variables.EXIT_RESIZE)


def _restart() -> None:
    basics.shutdown()
    basics.init()


def _reset(reset: Callable[[], object], why: Exception | None) -> None:
    try:
        reset()
    except CollectivesError as error:
        raise error from why
