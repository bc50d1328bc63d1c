"""Messages between `paceline exec` and a run that travels: objects in the datastore, by the run's own name.

    <prefix>/exec/knock              there is a new one; removed by the cluster's side once it has looked
    <prefix>/exec/<id>/in_<n>        lines of JSON: first the request, then what is passed on; none in a while: nobody is there
    <prefix>/exec/<id>/out_<n>       what comes back, line by line; at last an empty one: nothing follows

Who reads an object removes it. Each is encrypted and signed (`object_sync.encrypted`) by a key of the run's that is in the
job's ticket and in a file of the submitting user's: who can write to the store can't run anything, and who can read it learns
nothing. Only an empty answer is neither: the cluster's Python has no `cryptography`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from typing import Any

from paceline.data.stores.filesystem import Store
from paceline.data.stores.record import StoreRecord
from paceline.errors import PacelineError, RunStateError, TargetError, TransferError
from paceline.runs import states
from paceline.runs.execute import Files
from paceline.runs.folder import RunFolder
from paceline.system.files import read_json
from paceline.targets.ray.object_sync import can_encrypt, decrypted, encrypted, exists, get, put, remove, run_prefix

#: How often the cluster's side looks whether somebody has knocked, at a bucket, which charges for each look.
_KNOCK_S = 2.0
#: How often either side looks while a command runs.
_LOOK_S = 0.15
#: Without an answer, somebody may have removed the knock that was meant for this one.
_AGAIN_S = 6.0
_ALIVE_S = 5.0
#: As long as a store may be slow for, or away.
_SILENCE_S = 40.0
#: How many objects may wait to be read; then the command waits.
_AHEAD = 8


class Sealed:
    """The objects of one side of one command, each whole or not there. way: "in" or "out"."""

    def __init__(self, store: Store, run_id: str, key: str, name: str, way: str) -> None:
        self._store, self._run_id, self._key, self._way = store, run_id, bytes.fromhex(key), way
        self._top = f"{run_prefix(run_id)}/exec/{name}"
        #: How many were written, or read.
        self.count = 0

    def put(self, lines: list[dict[str, Any]]) -> None:
        """Store the next one.

        Raises:
            PacelineError: the store does not take it; it is the next one still.
        """
        name = self._name(self.count)
        put(self._store, name, encrypted(json.dumps(lines).encode(), self._key, name))
        self.count += 1

    def get(self) -> list[dict[str, Any]] | None:
        """The next one, which is gone then; None where it is not there.

        Raises:
            PacelineError: the store does not answer, or somebody else has written it.
        """
        name = self._name(self.count)
        found = get(self._store, name)
        if found is None:
            return None
        if not found:
            raise TargetError(
                f"run {self._run_id}: commands go through {self._store.title} encrypted, for which the cluster's Python needs "
                "cryptography. Install it there: pip install 'cryptography>=42'."
            )
        text = decrypted(found, self._key, name)
        if text is None:
            raise TransferError(f"{self._store.title}: {name!r} is not signed with this run's key.")
        with contextlib.suppress(FileNotFoundError):
            remove(self._store, name)
        self.count += 1
        lines: list[dict[str, Any]] = json.loads(text)
        return lines

    def refuse(self) -> None:
        """Answer that this Python can't encrypt."""
        put(self._store, self._name(0), b"")

    def is_full(self) -> bool:
        """True if the other side has so many to read that it should get no more."""
        return self.count >= _AHEAD and exists(self._store, self._name(self.count - _AHEAD))

    def _name(self, number: int) -> str:
        return f"{self._top}/{self._way}_{number:06d}"


#: How long the end of what was refused is waited for.
_REFUSED_S = 5.0


class StorePassage:
    """The asking program's side: as `paceline.runs.passage.Passage`."""

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
        self._waiting: list[dict[str, Any]] = []
        self._alive_at = self._looked_at = self._knocked_at = 0.0
        self._well_at = time.monotonic()
        self._is_closed = self._is_refused = False

    def begin(self, request: dict[str, Any]) -> None:
        self._in.put([request])
        self._knock()
        self._alive_at = time.monotonic()

    def tell(self, told: dict[str, Any]) -> None:
        self._waiting.append(told)
        if len(self._waiting) >= 100:
            self._pass_on()

    def heard(self) -> list[dict[str, Any]]:
        if time.monotonic() - self._looked_at < _LOOK_S:
            return []
        found: list[dict[str, Any]] = []
        try:
            self._look(found)
            self._well_at = time.monotonic()
        except PacelineError:
            # A store that is away for a moment; what was found before is not lost.
            if time.monotonic() - self._well_at > _SILENCE_S / 2:
                raise
        self._looked_at = time.monotonic()
        return found

    def _look(self, found: list[dict[str, Any]]) -> None:
        now = time.monotonic()
        if self._waiting or now - self._alive_at > _ALIVE_S:
            self._pass_on()
        if self._out.count == 0 and now - self._knocked_at > _AGAIN_S:
            self._knock()
        while not self.is_over and (lines := self._out.get()) is not None:
            self.is_over = not lines
            self._is_refused |= any("error" in line for line in lines)
            found += lines

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        deadline = time.monotonic() + _REFUSED_S
        while self._is_refused and not self.is_over and time.monotonic() < deadline:
            # The other side is leaving too: what it were told now would lie there until the run's end.
            self.heard()
            time.sleep(0.02)
        # Once the run has ended, nobody there would read it.
        is_over = self.is_over or (read_json(self._folder.record) or {}).get("status") in states.TERMINAL
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
    """The cluster's side: a thread that hands on what is asked for, between the store and the run's folder there."""

    def __init__(self, record: StoreRecord, folder: RunFolder, key: str) -> None:
        self._record, self._folder, self._key = record, folder, key
        self._ended = threading.Event()
        self._seen: set[str] = set()
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The supervisor has ended: say so, and leave nothing."""
        self._ended.set()
        self._thread.join(30)

    def _listen(self) -> None:
        with Store(self._record) as store:
            running: dict[str, _Handed] = {}
            looked_at = 0.0
            knock_s = _LOOK_S if store.kind == "local" else _KNOCK_S
            while not self._ended.wait(_LOOK_S):
                now = time.monotonic()
                if now - looked_at > knock_s:
                    looked_at = now
                    with contextlib.suppress(Exception):  # a store that is away for a while
                        for name in self._asked(store):
                            if can_encrypt():
                                running[name] = _Handed(store, self._folder, self._key, name)
                            else:
                                Sealed(store, self._folder.run_id, self._key, name, "out").refuse()
                for name, one in list(running.items()):
                    if not one.look():
                        one.close()
                        del running[name]
            for one in running.values():
                one.look()
                one.close()

    def _asked(self, store: Store) -> list[str]:
        knock = _knock(self._folder.run_id)
        if get(store, knock) is None:
            return []
        # First this: who knocks from now on is seen the next time.
        with contextlib.suppress(FileNotFoundError):
            remove(store, knock)
        new = [name for name in names(store, self._folder.run_id) if name not in self._seen]
        self._seen.update(new)
        return new


class _Handed:
    """One command, whose words are handed on."""

    def __init__(self, store: Store, folder: RunFolder, key: str, name: str) -> None:
        self._store, self._run_id, self._name = store, folder.run_id, name
        self._in = Sealed(store, folder.run_id, key, name, "in")
        self._out = Sealed(store, folder.run_id, key, name, "out")
        self._files = Files(folder)
        self._heard = time.monotonic()
        self._is_over = self._has_ended = False
        self._back: list[dict[str, Any]] = []

    def look(self) -> bool:
        """Hand on what there is; whether more may come."""
        try:
            while (lines := self._in.get()) is not None:
                self._heard = time.monotonic()
                for told in lines:
                    if self._in.count == 1:
                        self._files.begin(told)
                    elif told.get("gone"):
                        self._is_over = True
                        return False
                    else:
                        self._files.tell(told)
            if self._in.count and not self._back:
                self._back = self._files.heard()
            if self._back and not self._out.is_full():
                self._out.put(self._back)
                self._has_ended = self._has_ended or any("error" in told for told in self._back)
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
            clear(self._store, self._run_id, self._name)  # nobody is there who would
        else:
            with contextlib.suppress(PacelineError, OSError):
                self._out.put([])


def _knock(run_id: str) -> str:
    return f"{run_prefix(run_id)}/exec/knock"


def names(store: Store, run_id: str) -> list[str]:
    """The names of the commands that somebody has asked for."""
    top = f"{run_prefix(run_id)}/exec"
    if store.kind == "local":
        with contextlib.suppress(FileNotFoundError):
            return sorted(entry.name for entry in os.scandir(store.local(top)) if entry.is_dir())
        return []
    store.fs.invalidate_cache()
    with store.telling(f"looking into {top!r}"), contextlib.suppress(FileNotFoundError):
        found = store.fs.ls(store.full(top), detail=False)
        return sorted({str(path).rstrip("/").rsplit("/", 1)[-1] for path in found} - {"knock", "exec"})
    return []


def clear(store: Store, run_id: str, name: str, *, keep: int | None = None) -> None:
    """Remove what is left of a command. keep: the number of an object on its way to the cluster."""
    top = f"{run_prefix(run_id)}/exec/{name}"
    kept = f"in_{keep:06d}" if keep is not None else None
    with contextlib.suppress(Exception):  # it goes with the run's other objects in the end
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
