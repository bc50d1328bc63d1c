"""A channel for `paceline exec` through a datastore, for Ray clusters without a shared folder.

    <prefix>/exec/knock              announces a command; the cluster removes this object before it lists commands
    <prefix>/exec/<id>/in_<n>        messages as JSON: the request, then input. A silent client counts as lost
    <prefix>/exec/<id>/out_<n>       output lines; an empty object ends them

Readers remove the objects that they have read. Objects are encrypted and authenticated (`object_sync.encrypted`) with a key
of the run. The key is in the job's ticket and in a private file of the submitting user, so that other users of the
store can't run commands or read messages. Only an empty object is not encrypted. If it is the first output, the
cluster's Python has no `cryptography`.

The channel needs no connection to the nodes: the submitting machine may reach only the dashboard and the datastore.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Sequence
from typing import cast

from paceline.data.stores.filesystem import Store
from paceline.data.stores.record import StoreRecord
from paceline.errors import PacelineError, RunStateError, TargetError, TransferError
from paceline.runs import store
from paceline.runs.execute import Files
from paceline.runs.folder import RunFolder
from paceline.runs.remote_status import ExecMessage, ExecRequest
from paceline.targets.ray.object_sync import run_prefix
from paceline.targets.ray.store_objects import can_encrypt, decrypted, encrypted, exists, get, put, remove

#: Seconds between two polls of the store for new commands, by the cluster's side. Providers of buckets charge for each request.
_KNOCK_S = 2.0
#: Seconds between two polls of the store by each side of the channel while a command runs.
_LOOK_S = 0.15
#: Seconds after which the client repeats the announcement of a command without an answer, because the cluster may have missed it.
_AGAIN_S = 6.0
_ALIVE_S = 5.0
#: If the store is slow or unreachable for this many seconds, each side of the channel assumes that the other side has ended.
_SILENCE_S = 40.0
#: If this many objects are still unread, the sender waits for the reader.
_AHEAD = 8


class Sealed:
    """A sequence of encrypted datastore objects that carry one command's messages.

    way: "in" for messages to the command, "out" for its output.
    """

    def __init__(self, store: Store, run_id: str, key: str, name: str, way: str) -> None:
        self._store, self._run_id, self._key, self._way = store, run_id, bytes.fromhex(key), way
        self._top = f"{run_prefix(run_id)}/exec/{name}"
        #: Number of objects that this instance has written to the store or read from it. The next object's name has this number.
        self.count = 0

    def put(self, messages: Sequence[ExecRequest | ExecMessage]) -> None:
        """Encrypt messages, and write them to the datastore as the next object.

        Raises:
            PacelineError: The datastore fails. The caller may repeat the call.
        """
        name = self._name(self.count)
        put(self._store, name, encrypted(json.dumps(messages).encode(), self._key, name))
        self.count += 1

    def get(self) -> list[ExecMessage] | None:
        """Read and remove the next stored object. Return its messages; None if missing.

        Raises:
            PacelineError: The store fails, or a writer without the key has created the object.
        """
        name = self._name(self.count)
        data = get(self._store, name)
        if data is None:
            return None
        if not data:
            raise TargetError(
                f"run {self._run_id}: commands go through {self._store.title} encrypted, for which the cluster's Python needs "
                "cryptography. Install it there: pip install 'cryptography>=42'."
            )
        text = decrypted(data, self._key, name)
        if text is None:
            raise TransferError(f"{self._store.title}: {name!r} is not signed with this run's key.")
        with contextlib.suppress(FileNotFoundError):
            remove(self._store, name)
        self.count += 1
        messages: list[ExecMessage] = json.loads(text)
        return messages

    def refuse(self) -> None:
        """Tell the client by a plain, empty object that this Python can't encrypt."""
        put(self._store, self._name(0), b"")

    def is_full(self) -> bool:
        """Return whether too many objects wait for their reader."""
        return self.count >= _AHEAD and exists(self._store, self._name(self.count - _AHEAD))

    def _name(self, number: int) -> str:
        return f"{self._top}/{self._way}_{number:06d}"


#: Maximum seconds to wait until the cluster's side has closed the channel of a command that it refuses.
_REFUSED_S = 5.0


class StoreChannel:
    """The submitting machine's end of a channel for `paceline exec`."""

    def __init__(self, record: StoreRecord, folder: RunFolder) -> None:
        try:
            key = folder.exec_key.read_text(encoding="ascii")
        except (FileNotFoundError, PermissionError):
            raise RunStateError(
                f"run {folder.run_id}: the key to its commands, {folder.exec_key}, is not there, or another user's. "
                "Run this as the user that submitted the run, on the same workspace."
            ) from None
        self.is_over = False
        self._folder, self._run_id = folder, folder.run_id
        self._store = Store(record)
        self._name = secrets.token_hex(6)
        self._in = Sealed(self._store, folder.run_id, key, self._name, "in")
        self._out = Sealed(self._store, folder.run_id, key, self._name, "out")
        self._waiting: list[ExecMessage] = []
        self._alive_at = self._looked_at = self._knocked_at = 0.0
        self._well_at = time.monotonic()
        self._is_closed = self._is_refused = False

    def begin(self, request: ExecRequest) -> None:
        self._in.put([request])
        self._knock()
        self._alive_at = time.monotonic()

    def send(self, message: ExecMessage) -> None:
        self._waiting.append(message)
        if len(self._waiting) >= 100:
            self._pass_on()

    def receive(self) -> list[ExecMessage]:
        if time.monotonic() - self._looked_at < _LOOK_S:
            return []
        messages: list[ExecMessage] = []
        try:
            self._look(messages)
            self._well_at = time.monotonic()
        except PacelineError:
            # Ignore a short failure of the store, and return the messages that were read before it.
            if time.monotonic() - self._well_at > _SILENCE_S / 2:
                raise
        self._looked_at = time.monotonic()
        return messages

    def _look(self, messages: list[ExecMessage]) -> None:
        now = time.monotonic()
        if self._waiting or now - self._alive_at > _ALIVE_S:
            self._pass_on()
        if self._out.count == 0 and now - self._knocked_at > _AGAIN_S:
            self._knock()
        while not self.is_over and (arrived := self._out.get()) is not None:
            self.is_over = not arrived
            self._is_refused |= any("error" in message for message in arrived)
            messages += arrived

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        deadline = time.monotonic() + _REFUSED_S
        while self._is_refused and not self.is_over and time.monotonic() < deadline:
            # Wait until the cluster's side closes the channel: it would not remove a later message {"gone": true}.
            self.receive()
            time.sleep(0.02)
        # Send the message {"gone": true} only while the run lives, because no process reads it after the run's end.
        is_over = self.is_over or store.has_ended(self._folder)
        with contextlib.suppress(PacelineError, OSError):
            if not is_over:
                self._in.put([{"gone": True}])
        clear(self._store, self._run_id, self._name, keep=None if is_over else self._in.count - 1)
        self._store.close()

    def _pass_on(self) -> None:
        self._in.put(self._waiting)
        self._waiting = []
        self._alive_at = time.monotonic()

    def _knock(self) -> None:
        put(self._store, _knock(self._run_id), b"")
        self._knocked_at = time.monotonic()


class StoreListener:
    """A thread on the cluster that runs `paceline exec` commands from the store."""

    def __init__(self, record: StoreRecord, folder: RunFolder, key: str) -> None:
        self._record, self._folder, self._key = record, folder, key
        self._ended = threading.Event()
        self._seen: set[str] = set()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, which ends all commands and closes their channels."""
        self._ended.set()
        self._thread.join(30)

    def _listen(self) -> None:
        with Store(self._record) as store:
            running: dict[str, _Relay] = {}
            looked_at = 0.0
            knock_s = _LOOK_S if store.kind == "local" else _KNOCK_S
            while not self._ended.wait(_LOOK_S):
                now = time.monotonic()
                if now - looked_at > knock_s:
                    looked_at = now
                    with contextlib.suppress(Exception):  # the store may be down: try again later
                        for name in self._asked(store):
                            if can_encrypt():
                                running[name] = _Relay(store, self._folder, self._key, name)
                            else:
                                Sealed(store, self._folder.run_id, self._key, name, "out").refuse()
                for name, relay in list(running.items()):
                    if not relay.look():
                        relay.close()
                        del running[name]
            for relay in running.values():
                relay.look()
                relay.close()

    def _asked(self, store: Store) -> list[str]:
        knock = _knock(self._folder.run_id)
        if get(store, knock) is None:
            return []
        # Remove the announcement before listing commands. The next poll finds commands that are announced after this line.
        with contextlib.suppress(FileNotFoundError):
            remove(store, knock)
        new = [name for name in names(store, self._folder.run_id) if name not in self._seen]
        self._seen.update(new)
        return new


class _Relay:
    """A relay of one command's messages between the store and the supervisor's files."""

    def __init__(self, store: Store, folder: RunFolder, key: str, name: str) -> None:
        self._store, self._run_id, self._name = store, folder.run_id, name
        self._in = Sealed(store, folder.run_id, key, name, "in")
        self._out = Sealed(store, folder.run_id, key, name, "out")
        self._files = Files(folder)
        self._heard = time.monotonic()
        self._is_over = self._has_ended = False
        self._back: list[ExecMessage] = []

    def look(self) -> bool:
        """Relay new messages both ways. Return whether more messages may come."""
        try:
            while (messages := self._in.get()) is not None:
                self._heard = time.monotonic()
                for message in messages:
                    if self._in.count == 1:
                        self._files.begin(cast(ExecRequest, message))
                    elif message.get("gone"):
                        self._is_over = True
                        return False
                    else:
                        self._files.send(message)
            if self._in.count and not self._back:
                self._back = self._files.receive()
            if self._back and not self._out.is_full():
                self._out.put(self._back)
                self._has_ended = self._has_ended or any("error" in message for message in self._back)
                self._back = []
            if not self._back and (self._files.is_over or self._has_ended):
                return False
            return self._is_waited_for()
        except PacelineError:
            return self._is_waited_for()
        except (OSError, ValueError):
            return False

    def _is_waited_for(self) -> bool:
        self._is_over = time.monotonic() - self._heard > _SILENCE_S
        return not self._is_over

    def close(self) -> None:
        self._files.close()
        if self._is_over:
            clear(self._store, self._run_id, self._name)  # the client has gone, so remove the objects of both sides
        else:
            with contextlib.suppress(PacelineError, OSError):
                self._out.put([])


def _knock(run_id: str) -> str:
    return f"{run_prefix(run_id)}/exec/knock"


def names(store: Store, run_id: str) -> list[str]:
    """Return the ids of the `paceline exec` commands with messages in the store."""
    top = f"{run_prefix(run_id)}/exec"
    if store.kind == "local":
        with contextlib.suppress(FileNotFoundError):
            return sorted(entry.name for entry in os.scandir(store.local(top)) if entry.is_dir())
        return []
    store.fs.invalidate_cache()
    with store.translating(f"looking into {top!r}"), contextlib.suppress(FileNotFoundError):
        found = store.fs.ls(store.full(top), detail=False)
        return sorted({str(path).rstrip("/").rsplit("/", 1)[-1] for path in found} - {"knock", "exec"})
    return []


def clear(store: Store, run_id: str, name: str, *, keep: int | None = None) -> None:
    """Remove the messages of one command from the store.

    keep: Number of an input object to keep, because the cluster has not read it yet; None removes all messages.
    """
    top = f"{run_prefix(run_id)}/exec/{name}"
    kept = f"in_{keep:06d}" if keep is not None else None
    with contextlib.suppress(Exception):  # objects that can't be removed now are removed at the run's end
        if store.kind == "local":
            for path in store.local(top).iterdir():
                if path.name != kept:
                    path.unlink(missing_ok=True)
            if kept is None:
                store.local(top).rmdir()
            return
        store.fs.invalidate_cache()
        for path in store.fs.ls(store.full(top), detail=False):
            if not str(path).endswith(f"/{kept}"):
                store.fs.rm_file(path)
