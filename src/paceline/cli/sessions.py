"""forward: a tunnel to a port of a run."""

from __future__ import annotations

import contextlib
import signal

from paceline.cli.cancel import end
from paceline.cli.common import folder_of
from paceline.cli.options import NAMED_RUN, VerbOption, takes
from paceline.runs.tunnel import Tunnel
from paceline.system.signals import handled


@takes(
    NAMED_RUN,
    VerbOption("port", "Port on the worker's node, such as 8888.", "PORT", int, least=1, most=65535, needed=True),
    VerbOption("--local", "Port on this machine; default: a free one.", type=int, least=1, most=65535),
    VerbOption("--rank", "The worker to whose node the tunnel leads.", type=int, least=0, default=0),
)
def forward(*, run_id: str, port: int, local: int | None, rank: int) -> None:
    """Open a tunnel to a port on a worker's node. It ends with the run, or with Ctrl-C.

    Only programs of this machine can use the tunnel.
    """
    with (
        Tunnel(folder_of(run_id), port, rank=rank, local_port=local or 0) as tunnel,
        handled(end, signal.SIGTERM, signal.SIGHUP),
        contextlib.suppress(KeyboardInterrupt),
    ):
        print(
            f"127.0.0.1:{tunnel.local_port} leads to port {port} of rank {rank}'s node. Ctrl-C closes it.", flush=True
        )
        tunnel.serve()
