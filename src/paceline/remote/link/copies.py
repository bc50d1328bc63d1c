"""Create, mirror, fetch and remove copies of a run's folder on nodes that lack it.

If the agent or the supervisor was killed, a copy stays on its node. `clear_node` later fetches the copy's files and
removes it. `paceline prune` and the start of a later run on the node call `clear_node`. The start of a run leaves a
copy on the node if it would have to fetch more than 64 MiB of the copy's files.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.errors import PacelineError, RunNotFoundError, TargetError
from paceline.remote.link import sending
from paceline.remote.link.link import Link
from paceline.remote.link.messages import Pending
from paceline.remote.link.sending import all_or_error, answers, ask_each, home_of, on_each
from paceline.remote.replica.apply import Replica
from paceline.remote.replica.changes import GROWING, LARGE, SMALL, Stamp, stamp_of
from paceline.remote.staging.packing import pack_run
from paceline.runs import read, tags_and_properties
from paceline.runs.driver_log import say
from paceline.runs.folder import RunFolder
from paceline.runs.visible import visible
from paceline.system import locks
from paceline.system.files import read_json
from paceline.system.names import counted, some
from paceline.system.units import size_text

#: Tolerance in ns for differences between the nodes' clocks, and for the time that writing one checkpoint's files takes.
_CLOCKS_NS = 60 * 10**9

#: If an ended run lacks at most this many bytes, the next run on its node fetches them. `paceline prune` fetches larger amounts.
_IN_PASSING_BYTES = 64 << 20

_NOT_FETCHED = "checkpoints that only it has could not be fetched"

#: Run folder -> names of checkpoints that the run's script has removed, as far as this process knows.
_REMOVED: dict[str, set[str]] = {}


class Copies:
    """The copies of a run's folder on its nodes.

    All copies have the same path. Nodes that share a file system form a group and share one copy. A group's number is
    its lowest node rank. Only one node of each group, the leader, sends checkpoints and outputs.

    top: Absolute path of Paceline's folder on each node, for runs and snapshots.
    check: Ends this process if another supervisor has taken over the run while this machine was suspended.
    """

    def __init__(self, links: Sequence[Link], folder: RunFolder, top: str, check: Callable[[], object]) -> None:
        if not top.startswith("/"):
            raise TargetError(f"folder={top!r}: name an absolute path; it has to be the same on all nodes.")
        self._links, self._folder, self._top = links, folder, top
        self.path = f"{top}/runs/{folder.run_id}"
        record = read_json(folder.job) or {}
        self._log_limit = int((record.get("job") or {}).get("log_limit") or 0)
        self._target = str(record.get("target") or "NAME")
        removed = _REMOVED.setdefault(str(folder.path), set())
        self._replica = Replica(folder.path, removed=removed, check=check)
        self._replica.close()  # remove incomplete files that a killed supervisor has left
        self._groups: dict[int, int] = {}
        #: None, or (attempt of the last `follow`, {number of a group of nodes: rank of the node that sends the group's files}).
        self._followed: tuple[int, dict[int, int]] | None = None
        #: Groups of nodes that have started processes since the last fetch. Their newest files may be missing on this machine.
        self._unfetched: set[int] = set()

    def send(self) -> None:
        """Send the nodes the run's record, snapshot, earlier files and local input files.

        Raises:
            TargetError: A disk is full, or a node is lost.
        """
        links, ranks, token = self._links, self._ranks(), secrets.token_hex(4)
        there = ask_each(links, "list", 20.0, lambda link: {"path": f"{self._top}/runs"})
        others = [isinstance(one, dict) and bool({*one["names"]} - {self._folder.run_id}) for one in there]
        on_each([link for link, has_others in zip(links, others, strict=True) if has_others], self._clear)
        sent = on_each(
            links, lambda link: sending.send_run(link, f"{token}-{ranks[link]}", self._folder, self._top, self.path)
        )
        all_or_error(links, sent, f"the run could not be sent to {self.path}")
        # Write the mark files on all nodes before listing any: if a list lacked a mark, a shared folder would count as two.
        listed = ask_each(links, "list", 20.0, lambda link: {"path": f"{self.path}/.nodes"})
        marks = all_or_error(links, listed, "the run's folder is gone")
        # Use only mark files with the token of this call, because a killed supervisor may have left mark files.
        seen = [[int(name.partition("-")[2]) for name in one["names"] if name.startswith(token)] for one in marks]
        # Each node sees at least its own mark file, so no list is empty.
        self._groups = {rank: min(others) for rank, others in enumerate(seen)}
        self._even_out()
        self._send_carried()

    def _clear(self, link: Link) -> None:
        runs_dir, own = self._folder.path.parent, self._folder.run_id
        for left in clear_node(link, self._top, runs_dir, but=own, most_bytes=_IN_PASSING_BYTES):
            if not left.is_foreign:
                say(f"{link.name}: {left.text()}")

    def _even_out(self) -> None:
        """Copy to all groups of nodes the checkpoints that only some groups have.

        A group that was lost and has returned may have the newest checkpoint. All ranks must resume from it.
        """
        leaders, has = self._checkpoints_there()
        if len(leaders) < 2:
            return
        here, what = self._folder.checkpoints, _NOT_FETCHED
        # Fetch only checkpoints that may be newer than the local ones, because the script may have removed older checkpoints.
        newest_ns = max((path.stat().st_mtime_ns for path in here.rglob("*") if path.is_file()), default=0)
        late = [
            link
            for link, names in zip(leaders, has, strict=True)
            if any(
                stamp[1] > newest_ns - _CLOCKS_NS and not os.path.lexists(here / name) for name, stamp in names.items()
            )
        ]
        if late:
            self._mirror(late, 0)
            all_or_error(late, on_each(late, lambda link: link.flush()), what)
            self._send_checkpoints(leaders)

    def share_checkpoints(self) -> None:
        """Copy the run's checkpoints to nodes that lack them.

        Raises:
            TargetError: A disk is full, or a node is lost.
        """
        leaders, _ = self._checkpoints_there()
        self._send_checkpoints(leaders)

    def _checkpoints_there(self) -> tuple[list[Link], list[dict[str, Stamp]]]:
        """Return a link to each file system, and {name: [size, mtime, inode]} of its checkpoints."""
        leaders = [self._links[rank] for rank in self._leaders().values()]
        asked = ask_each(leaders, "have", 120.0, lambda link: {"path": f"{self.path}/checkpoints"})
        told = all_or_error(leaders, asked, _NOT_FETCHED)
        return leaders, [self._without_removed(link, one["found"]) for link, one in zip(leaders, told, strict=True)]

    def _send_checkpoints(self, leaders: Sequence[Link]) -> None:
        here, there = self._folder.checkpoints, f"{self.path}/checkpoints"
        sent = on_each(leaders, lambda link: sending.send_left(link, here, there))
        all_or_error(leaders, sent, f"the run could not be sent to {self.path}")

    def _without_removed(self, link: Link, names: Mapping[str, Stamp]) -> dict[str, Stamp]:
        over = {name for name in names if f"checkpoints/{name}" in self._replica.removed}
        for name in over:
            if not os.path.lexists(self._folder.checkpoints / name):
                link.remove(f"{self.path}/checkpoints/{name}")
        return {name: stamp for name, stamp in names.items() if name not in over}

    def _send_carried(self) -> None:
        packed = pack_run(self._folder)
        if packed is None:
            return
        links = [self._links[rank] for rank in self._leaders().values()]
        sent = on_each(links, lambda link: sending.send_carried(link, packed, self._top, self.path))
        all_or_error(links, sent, "what the job names here could not be sent")

    def follow(self, attempt: int) -> None:
        """Create an attempt's folder on the nodes, and mirror new files from them."""
        living = [link for link in self._links if link.lost is None]
        # Attempt 0 only prepares the nodes, and has no folder.
        if attempt:
            path = f"{self.path}/attempts/{attempt}"
            made = ask_each(living, "mkdirs", 20.0, lambda link: {"paths": [path]})
            all_or_error(living, made, f"{path} can't be made", may_be_lost=True)
        self._mirror(living, attempt)
        self._followed = (attempt, self._leaders())

    def _mirror(self, links: Sequence[Link], attempt: int) -> None:
        ranks, leaders = self._ranks(), self._leaders()

        def mirror(link: Link) -> Pending:
            rank = ranks[link]
            group = self._groups[rank]
            is_leader = leaders.get(group) == rank
            return link.mirror(
                self.path,
                self._folder,
                attempt,
                replica=self._replica,
                rank=rank,
                group=group,
                takes_files=is_leader,
                log_limit=self._log_limit,
            )

        told = answers(links, [mirror(link) for link in links], "mirror", 60.0)
        all_or_error(links, told, "the run's folder can't be followed", may_be_lost=True)

    def grown(self) -> set[str]:
        """Return the names of logs and metrics with new lines since the last call."""
        return self._replica.take_grown()

    def note_start(self, rank: int) -> None:
        """Record that a process starts on a node, so that `fetch` fetches its files."""
        self._unfetched.add(self._groups[rank])

    def fetch(self, attempt: int, *, is_last: bool = False) -> None:
        """Fetch all missing files from the nodes. Do nothing if `send` was not called.

        attempt: The number of the attempt whose logs are fetched.
        is_last: Whether the run has ended. If so, fetch files of the script's working directory too.

        Raises:
            TargetError: Some files can't be fetched; the message names the files or nodes, and the folder.
        """
        if not self._groups:
            return
        leaders = self._leaders()
        if (attempt, leaders) != self._followed:
            self.follow(attempt)  # if a group's sender is lost, another node of the group becomes the sender
            leaders = self._leaders()
        senders = [self._links[rank] for rank in leaders.values()]
        missing = []
        asked = {link: link.begin_flush(is_last=is_last) for link in senders}
        flushed = on_each(senders, lambda link: link.end_flush(asked[link]))
        for group, link, found in zip(leaders, senders, flushed, strict=True):
            if isinstance(found, OSError):
                missing.append(f"{link.name}: {found.strerror}: {found.filename!r}")
            elif isinstance(found, Exception):
                missing.append(str(found).rstrip("."))
            else:
                self._unfetched.discard(group)
        if any(link.lost for link in senders) and self._leaders().keys() == leaders.keys():
            self.fetch(attempt, is_last=is_last)  # try again, because another node of the group is alive
            return
        # Report the files of groups that have lost all their nodes, because no node can send these files any more.
        missing += [str(self._links[group].lost).rstrip(".") for group in sorted(self._unfetched - set(leaders))]
        if missing:
            raise TargetError(
                f"Some of the run's files could not be fetched ({some(missing, 5)}). They are in {self.path!r} there: "
                f"`paceline prune --compute {self._target}` brings them home."
            )

    def remove(self) -> None:
        """Remove the run's copies from the nodes, except copies that `fetch` could not fetch."""
        done = [self._links[rank] for group, rank in self._leaders().items() if group not in self._unfetched]
        ask_each(done, "remove", 600.0, lambda link: {"path": self.path})
        for link in done:
            link.drop_mirror()

    def close(self) -> None:
        """Remove partly received files from the run's folder, after the links are closed."""
        self._replica.close()

    def _leaders(self) -> dict[int, int]:
        """Return {group of nodes with a shared file system: its lowest live rank}."""
        found: dict[int, int] = {}
        for rank, link in enumerate(self._links):
            if link.lost is None:
                # Nodes that see the same folder form a group. Until `send` has found these groups, each node is its own group.
                found.setdefault(self._groups.get(rank, rank), rank)
        return found

    def _ranks(self) -> dict[Link, int]:
        return {link: rank for rank, link in enumerate(self._links)}


@dataclass(frozen=True, kw_only=True)
class LeftBehind:
    """Files on a node that a killed process has left.

    Attributes:
        run_id: The run that the files belong to; "" if they belong to no single run.
        missing: Names of files in the copy that the run's own folder lacks.
        stays: The reason why the files were not removed; "" if they were removed, or if `dry_run` is the only reason.
        is_foreign: Whether the run belongs to another workspace.
    """

    host: str
    run_id: str
    path: str
    missing: tuple[str, ...] = ()
    missing_bytes: int = 0
    stays: str = ""
    is_foreign: bool = False

    def text(self, *, will_be: bool = False) -> str:
        """Return a sentence such as "removed PATH of run ID"; with `will_be`, "would remove"."""
        files = f"{counted(len(self.missing), 'file')} ({size_text(self.missing_bytes)})" if self.missing else ""
        if self.stays:
            only = f", with {files} that only this node has" if files else ""
            of = f" of run {self.run_id}" if self.run_id else ""
            return visible(f"{self.path}{of} stays{only}: {self.stays}")
        verb = "would bring" if will_be else "brought"
        home = f"; {verb} home {files}: {some(self.missing, 5)}" if files else ""
        why = f" of run {self.run_id}, which has ended" if self.run_id else ", which no run needs"
        return visible(f"{'would remove' if will_be else 'removed'} {self.path}{why}{home}")


def clear_node(
    link: Link, top: str, runs_dir: Path, *, but: str = "", most_bytes: int | None = None, dry_run: bool = False
) -> Iterator[LeftBehind]:
    """Fetch missing files of ended runs from a node, and remove their copies there.

    Yield each copy. Skip runs that have not ended or have a live supervisor. Leave copies of other workspaces' runs.

    Args:
        link: The link to the node.
        top: Absolute path of Paceline's folder on the node.
        runs_dir: The folder of this workspace's runs.
        but: The id of a run to skip.
        most_bytes: Leave a copy on the node if the run's own folder lacks more bytes than this; None for no limit.
        dry_run: Report copies without fetching or removing files.
    """
    try:
        names = link.names_in(f"{top}/runs")
    except FileNotFoundError:
        return
    for name in names:
        if name == but:
            continue
        folder, path = RunFolder(runs_dir / name), f"{top}/runs/{name}"
        found = LeftBehind(host=link.name, run_id=name, path=path)
        if not folder.path.is_dir():
            yield _cleared(link, found, folder, is_known=False, most_bytes=most_bytes, dry_run=dry_run)
            continue
        with contextlib.suppress(RunNotFoundError, PermissionError):
            if not read.record(folder).is_terminal or (fd := locks.take(folder.lock)) is None:
                continue
            try:
                yield _cleared(link, found, folder, is_known=True, most_bytes=most_bytes, dry_run=dry_run)
            finally:
                os.close(fd)


def _cleared(
    link: Link, found: LeftBehind, folder: RunFolder, *, is_known: bool, most_bytes: int | None, dry_run: bool
) -> LeftBehind:
    try:
        if not is_known and not _is_of(link, found.path, folder):
            return replace(found, stays="it is not of this workspace", is_foreign=True)
        if not dry_run and (living := link.end_run(found.run_id)):
            return replace(found, stays=f"{counted(living, 'process')} of it can't be ended")
        record, there = (read.record(folder), link.have(found.path)) if is_known else (None, {})
        wanted = _only_there(there, folder, is_single=record is None or len(record.attempts) < 2)
        found = replace(found, missing=tuple(sorted(wanted)), missing_bytes=sum(wanted.values()))
        if dry_run:
            return found
        if record is not None and most_bytes is not None and found.missing_bytes > most_bytes:
            return replace(found, stays=f"`paceline prune --compute {record.target}` brings them home")
        if wanted:
            _fetch(link, found.path, folder, there, wanted)
            note = {f"fetched_later_{link.name}": f"{found.path} of {link.name} was brought home and removed there."}
            with contextlib.suppress(OSError, PacelineError):  # the run may have this note, or the disk may be full
                tags_and_properties.add_properties(folder.notes, note)
        link.remove(found.path)
    except OSError as error:
        if link.lost:
            raise
        return replace(found, stays=f"{error.strerror or error}: {error.filename or found.path!r}")
    return found


def _is_of(link: Link, path: str, folder: RunFolder) -> bool:
    try:
        marks = link.names_in(f"{path}/.nodes")
    except OSError:
        return False
    return any(link.sees(f"{path}/.nodes/{mark}", home_of(folder)) for mark in marks[:1])


def _only_there(there: Mapping[str, Stamp], folder: RunFolder, *, is_single: bool) -> dict[str, int]:
    """Return {name: missing bytes} of files that the run's own folder lacks.

    there: The files of the node's copy, as {name: [size, mtime, inode]}.
    is_single: Whether the run had one attempt. If not, metrics are ignored, since all attempts append to the same files.
    """
    found = {}
    for name, (size, changed, _) in there.items():
        top, here = name.split("/", 1)[0], stamp_of(str(folder.path / name)) or [0, 0, 0]
        if top in SMALL and name.endswith(GROWING):
            if size > here[0] and (top == "attempts" or (top == "metrics" and is_single)):
                found[name] = size - here[0]
        elif top in (*LARGE, "attempts") and changed > here[1]:
            found[name] = size
    return found


def _fetch(link: Link, path: str, folder: RunFolder, there: Mapping[str, Stamp], wanted: Container[str]) -> None:
    """Fetch the files named in `wanted` from a node's copy at `path`.

    there: The files of the copy, as {name: [size, mtime, inode]}.
    """
    # The node sends files that `known` lacks. If `known` had files that the node lacks, the node would report them as removed.
    known = {name: stamp for name, stamp in there.items() if name not in wanted}
    for name in there:
        if name in wanted and name.split("/", 1)[0] in SMALL and (here := stamp_of(str(folder.path / name))):
            known[name] = [*here[:2], 0]  # the node sends only the data after this size of a growing file
    replica = Replica(folder.path)
    try:
        link.answer(link.mirror(path, folder, 0, replica=replica, have=known), "mirror", 60.0)
        link.flush()
    finally:
        link.drop_mirror()
        replica.close()
