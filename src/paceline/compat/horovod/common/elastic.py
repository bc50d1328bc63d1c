"""State that survives a failed collective, and the loop that restores it."""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from paceline.collectives.errors import CollectivesError
from paceline.collectives.numbers import Array
from paceline.compat.horovod.common import basics, handles, objects
from paceline.compat.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from paceline.compat.horovod.common.kept_commits import KeptCommits, base_of
from paceline.compat.horovod.common.types import KeptState
from paceline.system import run_variables
from paceline.worker import report

T = TypeVar("T")

_log = logging.getLogger(__name__)
#: Values of the argument of `on_hosts_updated`: no change, hosts added, hosts removed, hosts added and removed.
NO_UPDATE, ADDED, REMOVED, MIXED = range(4)
#: After this many restores without a commit in between, the next error ends the job. The value is a guess.
_RESTORES_WITHOUT_COMMIT = 10


class Kept:
    """Base class of values that can be saved and restored."""

    def save(self) -> None:
        """Save the present values in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the saved values."""
        raise NotImplementedError

    def sync(self) -> None:
        """Set the values of every rank to the first rank's."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt the state to another number of ranks. A subclass may override this method."""


class State(Kept):
    """The state of a training script between batches.

    `bcast_object` gives every rank the first rank's object, and `get_rank` returns this process's rank.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        # No lock is needed, because append and pop are atomic. Another thread may append in `on_hosts_updated`.
        self._updates: list[tuple[float, int]] = []
        self._last_update: float = 0
        self._reset_callbacks: list[Callable[[], object]] = []
        self._commits = 0
        #: Files with commits that outlive this process, or None outside of `hvd.elastic.run`.
        self._kept_commits: KeptCommits | None = None

    def register_reset_callbacks(self, callbacks: list[Callable[[], object]]) -> None:
        """Call these functions after each restart of the collective engine."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Adapt the state after a restart of the collective engine."""
        # Drop notifications of earlier changes, because the restarted engine already uses the present hosts.
        self._updates.clear()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int = MIXED) -> None:
        """Record a change of the hosts, which `check_host_updates` reports later."""
        self._updates.append((timestamp, update_res))

    def commit(self) -> None:
        """Save, then check for host changes. All ranks must commit equally often.

        Raises:
            HostsUpdatedInterrupt: The hosts have changed.
        """
        # Save before the check, because the check may raise an exception, and the work so far would be lost.
        self.save()
        self._commits += 1
        self._keep()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Check whether the first rank knows of host changes.

        Raises:
            HostsUpdatedInterrupt: The hosts have changed. Every rank raises this error.
        """
        if run_variables.is_resize_requested():
            self.on_hosts_updated(time.time(), MIXED)
        last, seen = self._last_update, NO_UPDATE
        while self._updates:
            timestamp, update = self._updates.pop(0)
            if timestamp > last:
                last, seen = timestamp, seen | update
        # The first rank decides for all ranks: each rank may have other notifications. If each rank decided alone, some ranks
        # would stop a batch earlier, and the other ranks would wait for them in the next collective.
        before, self._last_update, everything = self._bcast_object((self._last_update, last, seen))
        if self._last_update > before:
            raise HostsUpdatedInterrupt(everything == REMOVED)

    def kept(self) -> KeptState | None:
        """Return the saved values in a form for files, or None."""
        return None

    def take_kept(self, kept: KeptState) -> None:
        """Replace the saved values by those of another process."""
        raise NotImplementedError

    def _keep(self) -> None:
        if self._kept_commits is not None and (kept := self.kept()) is not None:
            self._kept_commits.save(kept)


class ObjectState(State):
    """A state of Python objects, its attributes. Saving does not copy them."""

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: object) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = kwargs
        self._set_attrs()

    def save(self) -> None:
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        self._set_attrs()

    def sync(self) -> None:
        # All ranks have the same names of values, so either every rank broadcasts or no rank does.
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            self._set_attrs()

    def kept(self) -> KeptState | None:
        return {"values": self._saved_state}

    def take_kept(self, kept: KeptState) -> None:
        # Keep the script's own value if the commit's file lacks it, for example because it could not be written.
        self._saved_state |= {name: value for name, value in kept["values"].items() if name in self._saved_state}

    def _set_attrs(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


class VariablesState(ObjectState):
    """A state of a framework's variables and of plain values."""

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
        return {"values": self._saved_state, "variables": [handles.plain(array) for array in self._saved_variables]}

    def take_kept(self, kept: KeptState) -> None:
        pairs = zip(kept["variables"], self._saved_variables, strict=True)
        self._saved_variables = [handles.as_type(array, own) for array, own in pairs]
        super().take_kept(kept)

    def _read(self) -> list[Array]:
        """Return copies of the variables' values."""
        raise NotImplementedError

    def _write(self, values: list[Array]) -> None:
        """Set the variables to these values."""
        raise NotImplementedError

    def _spread(self) -> None:
        """Set every rank's variables to the first rank's values."""
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
    """Wrap `func(state, ...)` so that it restarts from the last commit.

    After a failed collective, each rank first restores its last commit. After a change of the hosts, no rank does. Then
    the engine of collectives restarts, all ranks get the first rank's state, and call `func` with it.
    """
    return run_fn(func, _restart)


def run_fn(func: Callable[..., T], reset: Callable[[], object]) -> Callable[..., T]:
    """Wrap `func`: after a failure, call `reset` and restart from the last commit."""

    @functools.wraps(func)
    def wrapper(state: State, *args: object, **kwargs: object) -> T:
        notification_manager.init()
        notification_manager.register_listener(state)
        is_new, skip_sync, restores, commits = True, False, 0, state._commits
        last: Exception | None = None
        base = base_of()
        state._kept_commits = None if base is None else KeptCommits(base)
        group = RankGroup.of_run()
        try:
            if group is not None and group.is_new:
                group.meet(state, is_new=True)
            elif state._kept_commits is not None:
                _go_on(state, state._kept_commits)
            while True:
                try:
                    # In the first round of this loop, the engine already runs, because the script has called `init`.
                    if not is_new:
                        # Restart the engine first: `on_reset` reads its number of ranks, and `sync` uses its connections.
                        _reset(reset, last)
                        state.on_reset()
                        if group is not None and group.meet(state, is_new=False):
                            skip_sync = False
                    if not skip_sync:
                        state.sync()
                    if group is not None:
                        group.enter(state)
                    return func(state, *args, **kwargs)
                except HorovodInternalError as error:
                    # A commit is progress, so count only the restores since the last commit.
                    restores = 1 if state._commits > commits else restores + 1
                    commits = state._commits
                    if restores > _RESTORES_WITHOUT_COMMIT:
                        raise
                    _log.warning("a collective has failed; going back to the last commit: %s", error)
                    # Restore this rank's own commit. After the reset, `sync` gives all ranks the same state.
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
            if group is not None:
                group.leave()

    return wrapper


class RankGroup:
    """The ranks of a run that replaces single lost ranks.

    In a process that replaces a lost rank, `is_new` is True until the process has joined the other ranks. See
    `paceline.supervisor.replacing`.
    """

    #: How often this process has entered the training function.
    _entries = 0

    def __init__(self, first: int) -> None:
        engine = basics.engine()
        self.is_new = first > 0 and RankGroup._entries == 0
        self._why_not = ""
        if engine.is_used:
            self._why_not = "the ranks communicate before hvd.elastic.run, which a new rank can't repeat alone"
        elif RankGroup._entries:
            self._why_not = "the script enters hvd.elastic.run several times"
        elif engine.generation != first:
            self._why_not = "the script calls hvd.init() several times before hvd.elastic.run"
        elif (torch := sys.modules.get("torch.distributed")) and torch.is_available() and torch.is_initialized():
            self._why_not = "the script has a process group of torch.distributed, which a new rank can't join"
        RankGroup._entries += 1

    @classmethod
    def of_run(cls) -> RankGroup | None:
        """Return the group of this run; None if it replaces no ranks."""
        first = os.environ.get(run_variables.GENERATION_VARIABLE)
        return None if first is None or basics.engine().transport_name != "gloo" else cls(int(first))

    def meet(self, state: State, *, is_new: bool) -> bool:
        """Tell all ranks which of them replace lost ranks. Return whether any rank does.

        A new first rank takes another rank's last commit, because `sync` sends the first rank's state to all ranks.

        Raises:
            CollectivesError: A reset callback has called a collective, in which new ranks do not take part.
        """
        if basics.engine().is_used:
            raise CollectivesError("a callback of the state's reset communicates, which a new rank does not repeat.")
        commits = state._kept_commits
        number = 0 if commits is None else commits.number
        everyone = objects.allgather_object((is_new, number), name="elastic_group")
        if commits is not None:
            commits.number = max(count for _, count in everyone)
        if everyone[0][0]:
            source = -max((count, -rank) for rank, (new, count) in enumerate(everyone) if not new)[1]
            own = None if is_new else state.kept()
            kept = objects.broadcast_object(own, root_rank=source, name="elastic_commit")
            if basics.rank() == 0:
                state.take_kept(kept)
                state.restore()
        return any(new for new, _ in everyone)

    def enter(self, state: State) -> None:
        """Tell the supervisor that this rank trains, so lost ranks may be replaced."""
        self.is_new = False
        kept = state.kept()
        # `kept` contains None if a user's handler stores its value elsewhere. New ranks can't start from such a commit.
        hands_over = kept is not None and None not in kept.get("handlers", {}).values()
        self._report(basics.engine().generation, hands_over=hands_over)

    def leave(self) -> None:
        """Tell the supervisor that this rank no longer trains."""
        self._report(None, hands_over=False)

    def _report(self, generation: int | None, *, hands_over: bool) -> None:
        values: dict[str, object] = {"generation": generation, "why_not": self._why_not, "hands_over": hands_over}
        report.write(f"group_{os.environ['PACELINE_RANK']}.json", values)


def _go_on(state: State, commits: KeptCommits) -> None:
    """Restore the state from an earlier attempt's last commit, if there is one."""
    kept = commits.load() if state._rank() == 0 else None
    if kept is not None:
        state.take_kept(kept)
        state.restore()
    # If rank 0 has a commit, all ranks continue from this commit, with the present number of ranks.
    has_commit, commits.number = state._bcast_object((kept is not None, commits.number))
    if has_commit:
        # As in Horovod, call `sync` before `on_reset`, so that reset callbacks see the committed state on all ranks.
        state.sync()
        state.on_reset()


def _leave(state: State) -> None:
    """If commits go to files, save the state and end this process."""
    if state._kept_commits is None:
        return
    # The script may have called check_host_updates instead of commit. Save now, so that the work since the last commit is kept.
    state.save()
    state._keep()
    # Wait until all ranks have written their files, because the exit of the first rank ends the other ranks.
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
