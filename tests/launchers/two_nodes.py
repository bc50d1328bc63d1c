"""Two nodes that are machines of their own, for launches over both."""

from __future__ import annotations

from paceline.job.plan import Node


def two_nodes(prefix: str, gpus: tuple[str, ...] = ()) -> tuple[Node, ...]:
    """`<prefix>0` and `<prefix>1`, in one network, each with another interface in it."""
    return tuple(
        Node(
            node_rank=rank,
            name=f"{prefix}{rank}",
            address=f"10.0.0.{rank + 1}",
            cores=4,
            gpus=gpus,
            interface=f"eth{rank}",
            network="10.0.0.0/24",
        )
        for rank in (0, 1)
    )
