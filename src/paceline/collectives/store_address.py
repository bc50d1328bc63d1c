"""Make torch's key-value store listen at MASTER_ADDR only, not at every address of the machine.

The store has no authentication. In a run on one machine, MASTER_ADDR is a loopback address, which other machines cannot
reach. In a run on several machines, MASTER_ADDR is an address in the nodes' network.

torch accepts a listening socket (`master_listen_fd`). A script's `init_process_group` creates its store in
`torch.distributed.rendezvous` by the name `TCPStore`, which `keep_to_master_address` replaces.
"""

from __future__ import annotations

import os
import sys

# Don't import TYPE_CHECKING from typing, which loads slowly: each worker loads this module before its script.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType
    from typing import Any, TypeVar

    T = TypeVar("T")

_MODULE = "torch.distributed.rendezvous"
_BACKLOG = 2048


def keep_to_master_address(environ: Mapping[str, str] = os.environ) -> None:
    """Make `init_process_group`'s store listen at MASTER_ADDR only.

    The change takes effect when torch.distributed is loaded. Repeated calls are harmless. Nothing changes under
    torchrun, or if MASTER_ADDR is a host name, because machines may resolve the name to different addresses.
    """
    # Under torchrun, an agent process of torchrun serves the store. The workers only connect to it, so change nothing.
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    loaded = sys.modules.get(_MODULE)
    if loaded is not None and hasattr(loaded, "TCPStore"):
        _patch(loaded, environ)
        return
    from paceline.system.lazy_import import when_loaded

    when_loaded(_MODULE, lambda module: _patch(module, environ))


def made(kind: Callable[..., T], host: str, port: int, **options: object) -> T:
    """Create torch's key-value store by `kind(...)`. Its server listens only at `host` if possible."""
    fd = store_listener(host, port) if options.get("is_master") else None
    return kind(host, port, **options, **({} if fd is None else {"master_listen_fd": fd}))


def _patch(module: ModuleType, environ: Mapping[str, str]) -> None:
    kind: Any = getattr(module, "TCPStore", None)
    if kind is None or getattr(kind, "_paceline", False):
        return

    class TCPStore(kind):  # type: ignore[misc]
        """A torch store whose server listens only at MASTER_ADDR."""

        _paceline = True

        def __init__(self, *args: Any, **options: Any) -> None:
            names = ("host_name", "port", "world_size", "is_master")
            # Read MASTER_ADDR at each call: a script may set it after importing torch.
            here = environ.get("MASTER_ADDR", "")
            named = {**dict(zip(names, args, strict=False)), **options}
            is_ours = named.get("is_master") and named.get("host_name") == here and len(args) <= len(names)
            if is_ours and named.get("master_listen_fd") is None:
                fd = store_listener(here, int(named["port"]))
                options |= {} if fd is None else {"master_listen_fd": fd}
            super().__init__(*args, **options)

    setattr(module, "TCPStore", TCPStore)  # noqa: B010 - torch's stubs call it final


def store_listener(host: str, port: int) -> int | None:
    """Return the descriptor of a listening socket for torch's store, or None.

    None means that the host is not an address of this machine, or that the port is taken. If the port is taken, torch
    reuses the store of an earlier process group in this process, or reports an error. Port 0 picks a free port.
    """
    import contextlib
    import socket

    if not _is_address(host):
        return None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as server:
        # Without SO_REUSEADDR, `bind` could fail, because the kernel blocks a port of the previous attempt for a minute.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, port))
        server.listen(_BACKLOG)
        # Return the bare descriptor, so that Python does not close it. torch will own the descriptor.
        return server.detach()
    return None


def _is_address(host: str) -> bool:
    import ipaddress

    try:
        # An IPv6 address may include its interface: fe80::1%eth0.
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True
