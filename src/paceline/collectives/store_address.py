"""The address at which torch's key-value store listens: MASTER_ADDR alone, where torch's own takes every address of the machine.

The store checks nobody's identity. On one machine MASTER_ADDR is a loopback address, which no other machine reaches; elsewhere
it is an address of the network that the nodes were given for.

torch takes a socket that listens already (`master_listen_fd`). A script's own `init_process_group` makes its store in
`torch.distributed.rendezvous`, by the name that `TCPStore` has there: that name is what `keep_to_master_address` sets.
"""

from __future__ import annotations

import os
import sys

# Not typing's: a worker loads this before its script.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType
    from typing import Any

_MODULE = "torch.distributed.rendezvous"
_BACKLOG = 2048


def keep_to_master_address(environ: Mapping[str, str] = os.environ) -> None:
    """Let the stores that `init_process_group` makes in this process listen at MASTER_ADDR alone, where that is an address
    of this machine; a name may stand for another one on each machine, so then, and below torchrun, nothing changes. May be
    called again. Loads nothing: it is done as soon as torch.distributed is.
    """
    # Below torchrun the agent holds the store, and its workers only connect to it.
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    loaded = sys.modules.get(_MODULE)
    if loaded is not None and hasattr(loaded, "TCPStore"):
        _patch(loaded, environ)
        return
    from paceline.system.lazy_import import when_loaded

    when_loaded(_MODULE, lambda module: _patch(module, environ))


def made(kind: Any, host: str, port: int, **options: Any) -> Any:
    """The store of torch's class `kind`; its server, if it is to have one, listens at `host` alone where that can be."""
    if not options.get("is_master"):
        return kind(host, port, **options)
    fd = store_listener(host, port)
    return kind(host, port, **options, **({} if fd is None else {"master_listen_fd": fd}))


def _patch(module: ModuleType, environ: Mapping[str, str]) -> None:
    kind: Any = getattr(module, "TCPStore", None)
    if kind is None or getattr(kind, "_paceline", False):
        return

    class TCPStore(kind):  # type: ignore[misc]
        """torch's, whose server listens at MASTER_ADDR alone."""

        _paceline = True

        def __init__(self, *given: Any, **options: Any) -> None:
            names = ("host_name", "port", "world_size", "is_master")
            # Read now: a script may set it after it has imported torch. The first four arguments may be given by place.
            here = environ.get("MASTER_ADDR", "")
            told = {**dict(zip(names, given, strict=False)), **options}
            is_ours = told.get("is_master") and told.get("host_name") == here and len(given) <= len(names)
            if not is_ours or told.get("master_listen_fd") is not None:
                super().__init__(*given, **options)
                return
            fd = store_listener(here, int(told["port"]))
            super().__init__(*given, **options, **({} if fd is None else {"master_listen_fd": fd}))

    setattr(module, "TCPStore", TCPStore)  # noqa: B010 - torch's stubs call it final


def store_listener(host: str, port: int) -> int | None:
    """A socket that listens there, for torch to take; None where torch is to do it in its own way: the host is no address of
    this machine's, or something listens on the port. That may be the store of an earlier process group of this process,
    which torch then takes; if it is another program, torch says so. Port 0: one that is free.
    """
    import contextlib
    import socket

    if not _is_address(host):
        return None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as server:
        # The port may be that of the attempt before, whose connections the kernel remembers for a minute.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen(_BACKLOG)
        # Detached, so that it stays open: torch takes the descriptor over.
        return server.detach()
    return None


def _is_address(host: str) -> bool:
    import ipaddress

    try:
        # An IPv6 address may name its interface: fe80::1%eth0.
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
