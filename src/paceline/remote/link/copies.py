"""The copies of a run's folder on nodes that do not see the supervisor's: made, followed, brought home, removed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence

from paceline.errors import TargetError
from paceline.remote.link.link import Link
from paceline.remote.link.sending import all_or_error, on_each, send_carried, send_left, send_run
from paceline.remote.replica.apply import Replica
from paceline.remote.replica.changes import Stamp
from paceline.remote.staging.packing import pack_run
from paceline.runs.folder import RunFolder
from paceline.system.files import read_json

#: So far apart may the clocks of two nodes be, and the writing of two parts of one checkpoint.
_CLOCKS_NS = 60 * 10**9

#: A run's folder -> names of checkpoints that its scripts have removed, as far as this process has heard of it.
_REMOVED: dict[str, set[str]] = {}


class Copies:
    """One folder a node, at the same path on all; some nodes may see the same one.

    top: absolute, on each node; what outlives the run lies there too. Nodes that see one folder are a group, named by its
    lowest rank; one node of each sends checkpoints and outputs.
    """

    def __init__(self, links: Sequence[Link], folder: RunFolder, top: str) -> None:
        if not top.startswith("/"):
            raise TargetError(f"folder={top!r}: name an absolute path; it has to be the same on all nodes.")
        self._links, self._folder, self._top = links, folder, top
        self.path = f"{top}/runs/{folder.run_id}"
        self._log_limit = int(((read_json(folder.record) or {}).get("job") or {}).get("log_limit") or 0)
        self._replica = Replica(folder.path, removed=_REMOVED.setdefault(str(folder.path), set()))
        self._replica.close()  # what a killed supervisor has left
        self._groups: dict[int, int] = {}
        #: groups in which something has run since their files were last brought home
        self._unfetched: set[int] = set()

    def send(self) -> None:
        """Give each node what it needs of the run.

        Raises:
            TargetError: no room, or a node is lost.
        """
        links, ranks, token = self._links, self._ranks(), secrets.token_hex(4)
        sent = on_each(links, lambda link: send_run(link, f"{token}-{ranks[link]}", self._folder, self._top, self.path))
        all_or_error(links, sent, f"the run could not be sent to {self.path}")
        # Every mark is written before any node lists them: a list that misses one would part a folder's nodes into two groups.
        listed = on_each(links, lambda link: link.names_in(f"{self.path}/.nodes"))
        marks = all_or_error(links, listed, "the run's folder is gone")
        # Only the marks of this sending: those of a killed supervisor may still lie there.
        seen = [[int(name.partition("-")[2]) for name in names if name.startswith(token)] for names in marks]
        # Each node sees its own mark at least, so no list is empty.
        self._groups = {rank: min(others) for rank, others in enumerate(seen)}
        self._even_out()
        self._send_carried()

    def _even_out(self) -> None:
        """Let all groups begin with the same checkpoints. One that was lost may be back with some that it had not sent, and its
        ranks would go on from another step than all others.

        Raises:
            TargetError: they could not be had, or not be sent.
        """
        leaders = [self._links[rank] for rank in self._leaders().values()]
        here, there = self._folder.checkpoints, f"{self.path}/checkpoints"
        what = "checkpoints that only it has could not be fetched"
        has = all_or_error(leaders, on_each(leaders, lambda link: link.have(there)), what)
        has = [self._without_removed(link, names) for link, names in zip(leaders, has, strict=True)]
        if len(leaders) < 2:
            return
        # Only what may be newer than all that is here: what is older the script may have removed, and nobody goes on from it.
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
            sent = on_each(leaders, lambda link: send_left(link, here, there))
            all_or_error(leaders, sent, f"the run could not be sent to {self.path}")

    def _without_removed(self, link: Link, names: Mapping[str, Stamp]) -> dict[str, Stamp]:
        """The node's checkpoints once those are removed that the run has removed while the node was away."""
        over = {name for name in names if f"checkpoints/{name}" in self._replica.removed}
        for name in over:
            if not os.path.lexists(self._folder.checkpoints / name):
                link.remove(f"{self.path}/checkpoints/{name}")
        return {name: stamp for name, stamp in names.items() if name not in over}

    def _send_carried(self) -> None:
        """Give each group the folders and packages of this machine that the job names, once.

        Raises:
            DataError, EnvironmentSpecError, TransferError: they are not here, or can't be read.
        """
        packed = pack_run(self._folder)
        if packed is None:
            return
        links = [self._links[rank] for rank in self._leaders().values()]
        sent = on_each(links, lambda link: send_carried(link, packed, self._top, self.path))
        all_or_error(links, sent, "what the job names here could not be sent")

    def follow(self, attempt: int) -> None:
        """Have the nodes send what is written there from now on; those of an attempt have its folder."""
        living = [link for link in self._links if link.lost is None]
        # 0 stands for no attempt, as while the nodes prepare; then there is no folder to be made.
        if attempt:
            path = f"{self.path}/attempts/{attempt}"
            made = on_each(living, lambda link: link.make_folders([path]))
            all_or_error(living, made, f"{path} can't be made", may_be_lost=True)
        self._mirror(living, attempt)

    def _mirror(self, links: Sequence[Link], attempt: int) -> None:
        ranks, leaders = self._ranks(), self._leaders()

        def mirror(link: Link) -> None:
            rank = ranks[link]
            group = self._groups[rank]
            is_leader = leaders.get(group) == rank
            link.mirror(
                self.path,
                self._folder,
                attempt,
                replica=self._replica,
                rank=rank,
                group=group,
                takes_files=is_leader,
                log_limit=self._log_limit,
            )

        all_or_error(links, on_each(links, mirror), "the run's folder can't be followed", may_be_lost=True)

    def note_start(self, rank: int) -> None:
        """Something runs on a node: there may be more to bring home."""
        self._unfetched.add(self._groups[rank])

    def fetch(self, attempt: int, *, is_last: bool = False) -> None:
        """Bring home all that is not here yet; nothing where the run could not be sent. is_last: as of `LinkFiles.flush`.

        Raises:
            TargetError: some could not be had; the message says what, and where it still is.
        """
        if not self._groups:
            return
        self.follow(attempt)  # where a node is lost, another of its group sends for both
        leaders = self._leaders()
        senders = [self._links[rank] for rank in leaders.values()]
        missing = []
        flushed = on_each(senders, lambda link: link.flush(is_last=is_last))
        for group, link, found in zip(leaders, senders, flushed, strict=True):
            if isinstance(found, OSError):
                missing.append(f"{link.name}: {found.strerror}: {found.filename!r}")
            elif isinstance(found, Exception):
                missing.append(str(found).rstrip("."))
            else:
                self._unfetched.discard(group)
        if any(link.lost for link in senders) and self._leaders().keys() == leaders.keys():
            self.fetch(attempt, is_last=is_last)  # another of the group is left
            return
        # Groups of which every node is lost: what has run there since the last fetch can't be had any more.
        missing += [str(self._links[group].lost).rstrip(".") for group in sorted(self._unfetched - set(leaders))]
        if missing:
            raise TargetError(
                f"Some of the run's files could not be fetched ({'; '.join(missing)}). They are in {self.path!r} there."
            )

    def remove(self) -> None:
        """Remove the copies; what could not be brought home stays where it is."""
        done = [self._links[rank] for group, rank in self._leaders().items() if group not in self._unfetched]
        on_each(done, lambda link: link.remove(self.path))

    def close(self) -> None:
        """Let nothing half-arrived stay here. For when the links are closed."""
        self._replica.close()

    def _leaders(self) -> dict[int, int]:
        """group -> the lowest rank of it that is not lost."""
        found: dict[int, int] = {}
        for rank, link in enumerate(self._links):
            if link.lost is None:
                # As long as the marks have not been compared each node counts as a group of its own.
                found.setdefault(self._groups.get(rank, rank), rank)
        return found

    def _ranks(self) -> dict[Link, int]:
        return {link: rank for rank, link in enumerate(self._links)}
