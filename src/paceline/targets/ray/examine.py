"""Open links (connections to agents) to a cluster's nodes, for `paceline compute doctor`.

A Ray job holds the nodes. Its tasks connect to the submitting machine, which the nodes must reach. Runs do not need that.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import paceline
from paceline.errors import EngineError, TargetError
from paceline.targets.ray.client import RayClient, send_library
from paceline.targets.ray.entry import examine_entrypoint
from paceline.targets.ray.listener import Reception
from paceline.targets.ray.settings import RaySettings, own_folder

if TYPE_CHECKING:
    from paceline.remote.link import Link

_PLACE_S = 40.0
_TICK_S = 0.1
_ASK_S = 1.0


@contextlib.contextmanager
def examined(client: RayClient, settings: RaySettings, bundles: list[dict[str, float]]) -> Iterator[list[Link]]:
    """Get a node per bundle of resources. Yield links to their agents.

    Raises:
        EngineError: Ray provides no nodes, or the nodes can't reach this machine.
    """
    from paceline.targets.ray.allocate import open_links

    library = Path(paceline.__file__).resolve().parents[1]
    job_id = f"paceline-doctor-{secrets.token_hex(6)}"
    here = own_address(settings.address)
    reception = Reception(host=here)
    links: list[Link] = []
    try:
        request = {"bundles": bundles, "name": job_id, "host": here, "port": reception.port, "token": reception.token}
        runtime_env = {"working_dir": send_library(client, library)}
        client.submit(examine_entrypoint(json.dumps(request)), job_id, runtime_env, {"job_name": job_id})
        _wait(client, job_id, reception, len(bundles))
        links = open_links(
            reception.taken,
            library,
            settings.folder or own_folder(),
            shared_library=settings.is_shared,
            silence_s=settings.silence_s,
        )
        yield links
    finally:
        for link in links:
            link.close()
        # Stop the job only after closing the links to the nodes, because stopping the job kills the processes that the links use.
        reception.close()
        with contextlib.suppress(TargetError, EngineError):
            client.stop(job_id)


def own_address(address: str) -> str:
    """Return the address of this machine on the route to a URL's host."""
    parts = urlsplit(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((parts.hostname or "", parts.port or 80))  # UDP: sends nothing, only finds the local address
        except OSError as error:
            raise EngineError(f"the Ray cluster at {address} can't be reached from here: {error}.") from error
        return str(probe.getsockname()[0])


def _wait(client: RayClient, job_id: str, reception: Reception, count: int) -> None:
    deadline, asked = time.monotonic() + _PLACE_S, time.monotonic()
    while len(reception.taken) < count:
        time.sleep(_TICK_S)
        if time.monotonic() - asked < _ASK_S:
            continue
        asked = time.monotonic()
        # The dashboard can only return the job's log, so the driver prints its events into the log, one per line.
        told = _last_told(client.logs(job_id))
        if told.get("is") in ("ended", "failed"):
            raise EngineError(f"a node was not provided by Ray: {told.get('why')}.")
        job = client.job(job_id)
        if job is not None and job.status not in ("PENDING", "RUNNING"):
            raise EngineError(f"the job that was to hold nodes is {job.status}: {' '.join(job.message.split())[:300]}")
        if asked > deadline:
            here = f"this machine ({own_address(client.address)}, port {reception.port})"
            reason = {
                "waiting": f"{count} nodes with free CPUs are not to be had",
                "placed": f"{len(reception.taken)} of {count} nodes have connected to {here}. Runs do not need that they "
                "reach it; call doctor on a machine of the cluster",
            }.get(str(told.get("is")), "Ray did not start the job that holds them")
            raise EngineError(f"no links to the nodes within {_PLACE_S:g} s: {reason}.")


def _last_told(log: str) -> dict[str, object]:
    for line in reversed(log.splitlines()):
        if line.startswith('{"is"'):
            with contextlib.suppress(ValueError):
                return dict(json.loads(line))
    return {}
