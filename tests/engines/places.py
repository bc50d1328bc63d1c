"""Each way to reach two other nodes, as a place to submit from; each sees different files of this machine."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.data.stores.datastore import Datastore
from paceline.runs import remote_status
from paceline.targets import polling
from paceline.targets.configured import Configured, add
from tests.engines.conformance import FRESH_S, GRACE_S
from tests.engines.hosts import Hosts
from tests.engines.lab import Lab
from tests.engines.ray_lab import TOKEN, TOKEN_VARIABLE, RayLab
from tests.engines.slurm_lab import SlurmLab

#: Two nodes of compute target `there`.
TWO = {"node_count": 2, "distributed_backend": "gloo", "compute_target": "there"}
_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Place:
    """name: among `WAYS`. lab: its workspace has compute target `there`. hosts: names that the nodes may have.

    folder: has the same path on the nodes, shared or not. address: this machine's, for nodes.
    environments: how many of one kind two nodes have together. reached: a datastore that is a folder of this machine, and
    that of the target where runs travel through one.
    """

    lab: Lab
    name: str = ""
    hosts: tuple[str, ...]
    folder: Path
    address: str
    environments: int
    reached: str


@contextlib.contextmanager
def ssh(network: Hosts, folder: Path, *, is_shared: bool = False) -> Iterator[Place]:
    """Hosts with a /tmp of their own; or with a workspace that all of them see."""
    seen = network.folder / f"elsewhere{next(_numbers)}"
    seen.mkdir()
    lab = Lab(seen if is_shared else folder)
    settings = {"hosts": list(network.names[:2]), "ssh_config": str(network.ssh_config), "python": sys.executable}
    add(lab.workspace_dir, Configured(name="there", kind="ssh", settings=settings))
    yield _place(lab, network, seen, environments=1 if is_shared else 2)


@contextlib.contextmanager
def slurm(cluster: SlurmLab, folder: Path, monkeypatch: pytest.MonkeyPatch, *, login: bool = False) -> Iterator[Place]:
    """Nodes that see the workspace; or a cluster behind a login host, whose nodes see a folder of its own."""
    lab, settings = Lab(folder), {"time": "10"}
    monkeypatch.setattr(polling, "FRESH_S", FRESH_S)
    monkeypatch.setattr(remote_status, "_GRACE_S", GRACE_S)
    if not login:
        for name, value in cluster.environment.items():
            monkeypatch.setenv(name, value)
        add(lab.workspace_dir, Configured(name="there", kind="slurm", settings=settings))
        yield _place(lab, cluster.hosts, folder, environments=1)
        return
    first = cluster.hosts.names[0]
    settings |= {"login": first, "ssh_config": str(cluster.hosts.ssh_config), "python": sys.executable}
    settings |= {"folder": str(folder / "far")}
    add(lab.workspace_dir, Configured(name="there", kind="slurm", settings=settings))
    with logged_in(cluster):
        yield _place(lab, cluster.hosts, folder, environments=1)


@contextlib.contextmanager
def logged_in(cluster: SlurmLab) -> Iterator[None]:
    """Slurm's commands know the cluster on its first host, the login host, as well."""
    first = cluster.hosts.names[0]
    cluster.hosts.run(first, ["mount", "--bind", str(cluster.folder), "/etc/slurm"])
    try:
        yield
    finally:
        cluster.hosts.run(first, ["umount", "/etc/slurm"])


@contextlib.contextmanager
def ray(cluster: RayLab, folder: Path, monkeypatch: pytest.MonkeyPatch, *, is_shared: bool = False) -> Iterator[Place]:
    """Nodes with a /tmp of their own, which only a datastore joins to this machine; or that see the workspace."""
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    monkeypatch.setattr(polling, "FRESH_S", FRESH_S)
    monkeypatch.setattr(remote_status, "_GRACE_S", GRACE_S)
    seen = cluster.folder / f"elsewhere{next(_numbers)}"
    seen.mkdir()
    lab = Lab(seen if is_shared else folder)
    if is_shared:
        cluster.add_target(lab.workspace_dir, "there")
    else:
        Datastore.register(pl.Workspace(lab.workspace_dir), "between", str(seen / "between"))
        cluster.add_target(lab.workspace_dir, "there", datastore="between")
    found = _place(lab, cluster.whole().hosts, seen, environments=1 if is_shared else 2)
    yield found if is_shared else replace(found, reached="between")


WAYS: dict[str, tuple[str, Callable[..., contextlib.AbstractContextManager[Place]]]] = {
    "ssh": ("ssh_network", ssh),
    "ssh, shared folder": ("ssh_network", partial(ssh, is_shared=True)),
    "slurm": ("slurm_cluster", slurm),
    "slurm, login host": ("slurm_cluster", partial(slurm, login=True)),
    "ray, shared folder": ("ray_cluster", partial(ray, is_shared=True)),
    "ray": ("ray_cluster", ray),
}

#: Targets whose nodes see the workspace, so that no file has to be sent to the nodes.
_SHARED = ("ssh, shared folder", "slurm", "ray, shared folder")
#: The targets as parameters of a fixture. Of each kind, `make test` uses the target that has to send all files to the
#: nodes and back. The conformance tests cover nodes that see the workspace.
EACH = [pytest.param(name, marks=[pytest.mark.proof] if name in _SHARED else []) for name in WAYS]


@contextlib.contextmanager
def place(name: str, request: pytest.FixtureRequest, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """The place of this name, on the session's engine."""
    fixture, make = WAYS[name]
    engine = request.getfixturevalue(fixture)
    with make(engine, folder) if fixture == "ssh_network" else make(engine, folder, monkeypatch) as found:
        yield replace(found, name=name)


@contextlib.contextmanager
def web(address: str, folder: Path) -> Iterator[str]:
    """The URL under which a folder can be read from other hosts."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer((address, 0), partial(Quiet, directory=str(folder)))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://{address}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _place(lab: Lab, hosts: Hosts, seen: Path, *, environments: int) -> Place:
    return Place(
        lab=lab,
        hosts=hosts.names,
        folder=seen,
        address=hosts.own_address,
        environments=environments,
        reached="own",
    )
