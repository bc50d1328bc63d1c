"""The part of `local` for `paceline compute` and the doctor: the state of this machine, and a link to an agent on it."""

from __future__ import annotations

import contextlib
import getpass
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from paceline.remote.agent.gpus import devices
from paceline.system.processes import core_count
from paceline.targets.local import LocalTarget
from paceline.targets.local_leases import LocalQueue, leases_dir
from paceline.targets.options import Option, check_settings

if TYPE_CHECKING:
    from paceline.remote.link.link import Link
    from paceline.targets.status import Status


class ThisMachine(LocalTarget):
    """`local`, as a kind of compute target that has no settings."""

    kind: ClassVar[str] = "local"
    OPTIONS: ClassVar[tuple[Option, ...]] = ()

    def __init__(self, name: str = kind, settings: Mapping[str, Any] = {}) -> None:
        check_settings(self.kind, self.OPTIONS, settings, name)
        super().__init__()

    def status(self) -> Status:
        """This machine, and what of it runs hold by leases."""
        # Not above: each supervisor of this machine loads this module, and none asks.
        from paceline.targets.status import Status, leased

        gpus, cores = devices(), core_count()
        # A look drops the tickets of dead runs, as every user of the queue does.
        tickets = LocalQueue(leases_dir(), cores, gpus).tickets()
        granted = [ticket for ticket in tickets if ticket["granted"] is not None]
        return Status(
            nodes=(leased(socket.gethostname(), cores, gpus, granted),),
            running=len(granted),
            queued=len(tickets) - len(granted),
        )

    @contextlib.contextmanager
    def examine(self, node_count: int | None = None) -> Iterator[list[Link]]:
        """Open one link, however many nodes are asked for: they are all this machine."""
        import paceline
        from paceline.remote.call import bootstrap_words
        from paceline.remote.link.link import Link

        link = Link.open(
            bootstrap_words(sys.executable),
            name=socket.gethostname(),
            library_dir=Path(paceline.__file__).resolve().parents[1],
            folder=f"/tmp/paceline-{getpass.getuser()}",
            shared_library=True,
        )
        try:
            yield [link]
        finally:
            link.close()
