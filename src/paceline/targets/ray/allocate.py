"""Allocate a placement group, and link to an agent on each of its nodes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from paceline.errors import EngineError
from paceline.job.plan import Node
from paceline.remote.link import AgentNodes, Link, LinkError, script_python
from paceline.remote.link.bootstrap import Ends
from paceline.targets.base import Waiting
from paceline.targets.ray.listener import Taken
from paceline.targets.ray.placement_group import GroupRequest, Holding, LostError

_LINK_S = 60.0
#: Number of times to try to get the nodes. A node may die between its placement and its first message.
_TRIES = 3


def gather(asked: GroupRequest, port_count: int, waiting: Waiting) -> RayNodes | None:
    """Return the run's nodes, or None if the callback `waiting` cancels the wait.

    Raises:
        TargetError: The cluster can't hold the run.
        EngineError: Ray does not answer, nodes keep dying, or an agent does not start.
    """
    for left in reversed(range(_TRIES)):
        try:
            return _gather(asked, port_count, waiting)
        except LostError as error:
            # Retry with a new placement group, for which Ray chooses living nodes.
            if not left:
                raise EngineError(f"{_TRIES} times in a row, Ray gave nodes that died at once: {error}") from error
    raise AssertionError


def _gather(asked: GroupRequest, port_count: int, waiting: Waiting) -> RayNodes | None:
    holding = Holding(asked)
    with contextlib.ExitStack() as undo:
        undo.callback(holding.close)
        taken = holding.wait(waiting)
        if taken is None:
            return None
        links = open_links(
            taken, asked.library_dir, asked.folder, shared_library=asked.is_shared, silence_s=asked.silence_s
        )
        for link in links:
            undo.callback(link.close)
        nodes = _nodes(asked, holding, taken, links, port_count)
        undo.pop_all()
        return nodes


class RayNodes(AgentNodes):
    """The nodes of a Ray placement group, which also reports lost nodes."""

    holding: Holding
    #: `ids`: Ray's ids of the nodes, by rank. `gone`: the ids of the nodes that were lost before `close` was called.
    ids: tuple[str, ...] = ()
    gone: frozenset[str] = frozenset()

    def lost(self) -> dict[int, str]:
        return {**self.holding.lost(), **super().lost()}

    def spare(self) -> int:
        """Return how many more nodes an elastic run could get now."""
        self.holding.lost()  # reads the driver's new messages, such as the number of spare nodes
        return self.holding.spare

    def close(self) -> None:
        if not self.gone:
            self.gone = frozenset(self.ids[rank] for rank in self.lost() if rank < len(self.ids))
        super().close()


def open_links(
    taken: Mapping[int, Taken], library_dir: Path, folder: str, *, shared_library: bool, silence_s: float
) -> list[Link]:
    """Start an agent over each connection. Return links to the agents by rank.

    Raises:
        EngineError: An agent does not start. The call then closes all links.
    """
    names = _names([taken[rank].told for rank in sorted(taken)])

    def open_one(rank: int) -> Link | LinkError:
        try:
            return Link.over(
                Ends.of_socket(taken[rank].sock),
                name=names[rank],
                library_dir=library_dir,
                folder=folder,
                shared_library=shared_library,
                timeout_s=_LINK_S,
                silence_s=silence_s,
            )
        except LinkError as error:
            return error

    # Open all links at the same time, because each waits until Paceline's agent process has started on its node.
    with ThreadPoolExecutor(min(len(taken), 32), thread_name_prefix="paceline-ray-link") as pool:
        opened = list(pool.map(open_one, sorted(taken)))
    links = [link for link in opened if isinstance(link, Link)]
    for error in opened:
        if isinstance(error, LinkError):
            for link in links:
                link.close()
            raise EngineError(f"a node that Ray has given can't be used: {error}") from error
    return links


def _names(told: list[Mapping[str, Any]]) -> list[str]:
    """Return unique node names from the nodes' reports `told`: host names, else addresses."""
    for key in ("hostname", "address"):
        names = [str(one[key]) for one in told]
        if len(set(names)) == len(names):
            return names
    return [f"{one['address']}-{rank}" for rank, one in enumerate(told)]


def _nodes(
    asked: GroupRequest, holding: Holding, taken: Mapping[int, Taken], links: list[Link], port_count: int
) -> RayNodes:
    nodes = []
    for rank, link in enumerate(links):
        told = taken[rank].told
        nodes.append(
            Node(
                node_rank=rank,
                name=link.name,
                address=str(told["address"]),
                cores=max(1, int(asked.demand.bundles[rank]["CPU"])),
                gpus=tuple(told["gpus"]),
            )
        )
    # `close` calls `on_close` after closing the links to the nodes, because `on_close` ends Ray's tasks without a grace period.
    on_close: Callable[[], None] = holding.close
    python = script_python(asked.python, asked.submitter, links) or str(taken[0].told["python"])
    found = RayNodes(links, tuple(nodes), port_count, folder=asked.folder, python=python, on_close=on_close)
    found.holding, found.ids = holding, tuple(str(taken[rank].told.get("node_id", "")) for rank in sorted(taken))
    return found
