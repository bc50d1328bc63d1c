"""Supervise a run on a cluster without a shared folder (`python -m ... TICKET`).

The program fetches the run from the datastore into a new workspace and starts the supervisor in it. Until the supervisor has
ended, it regularly stores the latest changes of the run's folder in the datastore.

    <folder>/away/<run id>/runs/<run id>/, snapshots/, datastores/      removed at the end
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from paceline.data.stores.filesystem import Store
from paceline.errors import PacelineError
from paceline.runs import states
from paceline.runs.folder import RunFolder
from paceline.system.files import PRIVATE, make_own, read_json, write_json
from paceline.targets.ray.channel import StoreListener
from paceline.targets.ray.delta import DeltaRecorder, end_part
from paceline.targets.ray.driver_process import DRIVER_VARIABLE, READS, SAYS
from paceline.targets.ray.entry import COMPLAINT
from paceline.targets.ray.object_sync import Ticket, part_name, run_prefix, signed_part, snapshot_name, unsealed
from paceline.targets.ray.settings import own_folder
from paceline.targets.ray.store_objects import get, put, tree_sha256, unpack

_TICK_S = 0.1
_PART_S = 1.0
#: Seconds for which to retry if the store fails at the run's end. Afterwards the run's last files are lost.
_PATIENCE_S = 120.0


def main(argv: list[str]) -> int:
    ticket = Ticket.from_word(argv[0])
    # Ignore SIGTERM, which all processes of a stopped job receive: this program outlives the supervisor.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    top = Path(ticket.folder or own_folder()) / "away" / ticket.run_id
    try:
        if not ticket.folder:
            make_own(Path(own_folder()))
        with Store(ticket.record) as store:
            folder = _fetch(store, ticket, top)
            return _see_through(store, ticket, folder, top)
    except (PacelineError, PermissionError) as error:
        print(f"{COMPLAINT}{str(error).rstrip('.')}", flush=True)
        return 70


def _fetch(store: Store, ticket: Ticket, top: Path) -> RunFolder:
    shutil.rmtree(top, ignore_errors=True)
    top.mkdir(parents=True, mode=0o700)
    folder = RunFolder(top / "runs" / ticket.run_id)
    name = f"{run_prefix(ticket.run_id)}/start.tar.gz"
    start = _got(store, name)
    if hashlib.sha256(start).hexdigest() != ticket.start_sha256:
        raise PacelineError(
            f"{store.title}: {name!r} differs from the submitted one: its SHA-256 is another. Submit the run again."
        )
    unpack(start, top)
    folder.path.parent.mkdir()
    (top / "run").rename(folder.path)
    if ticket.key is not None:
        write_json(folder.secrets, unsealed(store, ticket.run_id, ticket.key), mode=PRIVATE)
    if ticket.snapshot_id is not None:
        snapshot = top / "snapshots" / ticket.snapshot_id
        snapshot.mkdir(parents=True)
        name = snapshot_name(ticket.snapshot_id)
        unpack(_got(store, name), snapshot)
        if tree_sha256(snapshot) != ticket.snapshot_sha256:
            raise PacelineError(
                f"{store.title}: {name!r} does not hold the source that was submitted. Remove it there and submit the run again."
            )
        folder.snapshot.symlink_to(os.path.relpath(snapshot, folder.path))
    return folder


def _got(store: Store, path: str) -> bytes:
    data = get(store, path)
    if data is None:
        raise PacelineError(f"{store.title} has no {path!r}. Does the cluster reach the very store of the workspace?")
    return data


def _see_through(store: Store, ticket: Ticket, folder: RunFolder, top: Path) -> int:
    recorder = DeltaRecorder(folder.path)
    recorder.skip_present()
    journal = _Journal(store, ticket.run_id, ticket.exec_key)
    # Write the supervisor's output to the run's own log. The job's standard error would go into Ray's log.
    log = os.open(folder.driver_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "paceline.supervisor", str(folder.path)],
        cwd=folder.path,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(READS, SAYS) if DRIVER_VARIABLE in os.environ else (),
    )
    os.close(log)
    _let_go_of_driver()
    listener = StoreListener(ticket.record, folder, ticket.exec_key)
    stored = 0.0
    # Record new changes only when the earlier changes are stored. Otherwise they are recorded later, all together.
    while supervisor.poll() is None:
        time.sleep(_TICK_S)
        if time.monotonic() - stored >= _PART_S:
            stored = time.monotonic()
            if not journal.waits and (part := recorder.part()) is not None:
                journal.add(part)
            with contextlib.suppress(PacelineError):
                journal.store()
    listener.close()
    deadline = time.monotonic() + _PATIENCE_S
    while (part := recorder.part(is_final=True)) is not None:
        journal.add(part)
        _insist(journal, deadline)
    status = (read_json(folder.state) or {}).get("status")
    # All changes are stored. Remove the folder before announcing the end, so that no files stay on this node.
    shutil.rmtree(top, ignore_errors=True)
    journal.add(end_part())
    _insist(journal, deadline)
    return 0 if status == states.COMPLETED else 1


def _let_go_of_driver() -> None:
    """Close this process's ends of the driver's pipes; the supervisor keeps its copies."""
    if os.environ.pop(DRIVER_VARIABLE, None):
        for fd in (READS, SAYS):
            os.close(fd)


def _insist(journal: _Journal, deadline: float) -> None:
    while True:
        try:
            journal.store()
            return
        except PacelineError:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


class _Journal:
    """A queue of changes to the run's folder that are not stored yet.

    key: The key that signs the stored changes, in hexadecimal.
    """

    def __init__(self, store: Store, run_id: str, key: str) -> None:
        self._store = store
        self._run_id = run_id
        self._key = key
        self._next = 0
        self._waiting: list[bytes] = []

    @property
    def waits(self) -> bool:
        return bool(self._waiting)

    def add(self, part: bytes) -> None:
        self._waiting.append(part)

    def store(self) -> None:
        """Store all waiting changes in the datastore.

        Raises:
            PacelineError: The store fails; the changes wait for the next call.
        """
        while self._waiting:
            signed = signed_part(self._waiting[0], self._key, self._run_id, self._next)
            put(self._store, part_name(self._run_id, self._next), signed)
            self._next += 1
            del self._waiting[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
