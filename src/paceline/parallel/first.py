"""What the first rank decides, for all: two machines may measure, or round, a little differently. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from paceline.parallel.errors import ParallelError
from paceline.parallel.mesh import World


def decide(world: World, find: Callable[[], Any]) -> Any:
    """What `find` gives on rank 0. Called on all ranks, of which the others wait.

    Raises:
        ParallelError: on every rank, where `find` raised it.
    """
    found: list[Any] = [None]
    if world.rank == 0:
        try:
            found = [find()]
        except ParallelError as error:
            found = [error]
    if world.size > 1:
        dist.broadcast_object_list(found, src=0)
    if isinstance(found[0], ParallelError):
        raise found[0]
    return found[0]
