"""The rendezvous of ranks without MPI: torch's key-value store at MASTER_ADDR:MASTER_PORT.

The script's own `init_process_group` uses the same store: several clients in one process share the server of a port,
each with its own key prefix. Under torchrun, torchrun's agent process serves the store. Any process that reaches the
port can write to the store, so Paceline signs its values, which are JSON.
"""

from __future__ import annotations

import ipaddress
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from paceline.collectives import links, store_address
from paceline.collectives.errors import CollectivesError
from paceline.system.handshake import RUN_SECRET_VARIABLE, TAG_BYTES, is_tag, tag

if TYPE_CHECKING:
    from types import ModuleType

    from torch.distributed import ProcessGroupGloo
    from torch.distributed.distributed_c10d import Store

#: Environment variable of torch's launchers -> the variable that horovodrun sets instead, or "".
_VARIABLES = {"RANK": "HOROVOD_RANK", "WORLD_SIZE": "HOROVOD_SIZE", "MASTER_ADDR": "", "MASTER_PORT": ""}
#: Time limits in seconds, as in torch: for all ranks to join, and for an operation that all ranks have begun.
_START_S, _OPERATION_S = 300.0, 1800.0

#: This process's connection to each store (rank 0 also serves the store), and Gloo's network devices. Don't close them before
#: exit, because the script's process groups and the next engine use the same store.
_stores: dict[tuple[str, int], Store] = {}
_devices: dict[str, ProcessGroupGloo.Device] = {}

#: A signed value begins with this marker, and then has the signature. No JSON text begins with this marker.
_SIGNED = b"\x01signed "
_HEAD_BYTES = len(_SIGNED) + TAG_BYTES
_LEAST_SECRET_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """A part of the key-value store through which `size` ranks find each other.

    `address` is the address at which other ranks reach this machine. `where` names the store in error messages. `key`
    is the run's secret key, or None without a secret.
    """

    rank: int
    size: int
    address: str
    prefix: str
    where: str
    root: Store
    timeout_s: float
    operation_timeout: timedelta
    key: bytes | None = field(repr=False)

    def signed(self, name: str) -> SignedStore:
        """Return the part `name` of the key-value store, for signed JSON values."""
        return SignedStore(self.raw_store(name), f"{self.prefix}/{name}", self.where, self.key)

    def store(self, name: str) -> Store:
        """Return the part `name` of the key-value store, for torch's process groups."""
        return self.raw_store(name) if self.key is None else self.signed(name).for_torch()

    def raw_store(self, name: str) -> Store:
        """Return the part `name` of the key-value store, without signatures."""
        from torch.distributed.distributed_c10d import PrefixStore

        return PrefixStore(f"{self.prefix}/{name}", self.root)

    def link_key(self, nonce: bytes) -> bytes:
        """Derive the key for TCP connections between ranks from a random value, `nonce`."""
        return nonce if self.key is None else tag(self.key, "links", nonce)

    def part(self, name: str, members: Sequence[int]) -> Meeting:
        """Return a rendezvous of these ranks. Other ranks must not call this."""
        return replace(self, rank=members.index(self.rank), size=len(members), prefix=f"{self.prefix}/{name}")

    def device(self) -> ProcessGroupGloo.Device:
        """Return the object by which Gloo uses a network interface."""
        from torch.distributed import ProcessGroupGloo

        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
        key = interface or self.address
        if key not in _devices:
            how = {"interface": interface} if interface else {"hostname": self.address}
            _devices[key] = ProcessGroupGloo.create_device(**how)
        return _devices[key]

    def wait_for_all(self) -> list[str]:
        """Wait until every rank has arrived. Return the ranks' addresses."""
        store = self.signed("here")
        with self.translated("say that this rank is here"):
            store.set(str(self.rank), self.address)
        # Poll the keys: the store could wait for them, but the error at its timeout would not name the missing keys.
        end_s = time.monotonic() + self.timeout_s
        pause_s = 0.002
        missing = list(range(self.size))
        while True:
            with self.translated("ask which ranks are here"):
                missing = [rank for rank in missing if not store.has(str(rank))]
            if not missing:
                with self.translated("read where the ranks are"):
                    return [_address(store.get(str(rank)), rank) for rank in range(self.size)]
            if time.monotonic() > end_s:
                raise CollectivesError(
                    f"rank {', '.join(map(str, missing))} of {self.size} ranks did not call hvd.init() within "
                    f"{self.timeout_s:g} s of rank {self.rank}. Has it ended, or does it take another way through the "
                    "script? HOROVOD_GLOO_TIMEOUT_SECONDS sets a longer time."
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.2, 0.1)

    @contextmanager
    def translated(self, what: str) -> Iterator[None]:
        """Raise torch's errors in the block as CollectivesError: "could not <what>"."""
        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:
            if isinstance(error, CollectivesError):
                raise
            first = (str(error).splitlines() or [repr(error)])[0]
            raise CollectivesError(
                f"rank {self.rank} could not {what}: {first}. Look for a rank that has ended, and whether the machines "
                "reach each other (GLOO_SOCKET_IFNAME names the network interface to use)."
            ) from error


def meet(environ: Mapping[str, str], generation: int) -> Meeting:
    """Return the rendezvous of all ranks for engine number `generation`, once all have arrived."""
    meeting = place_to_meet(environ, str(generation))
    far = [other for other in meeting.wait_for_all() if not _is_loopback(other)]
    if far and _is_loopback(meeting.address):
        # A machine often resolves its own name to a loopback address. Use the address of its route to another rank instead.
        return replace(meeting, address=links.own_address(far[0], 9))
    return meeting


def place_to_meet(environ: Mapping[str, str], name: str) -> Meeting:
    """Return a rendezvous under this name, without waiting for other ranks."""
    from paceline.collectives.settings import _number

    rank, size, host, port = place(environ)
    given_s = _number(environ, "HOROVOD_GLOO_TIMEOUT_SECONDS", 0.0)
    try:
        import torch.distributed as dist
    except ImportError as error:
        raise CollectivesError(
            f"collectives over Gloo need torch, which {sys.executable} doesn't have. Install it "
            "(pip install 'paceline[torch]'), or use MPI: pip install 'paceline[mpi]' and distributed_backend='mpi'."
        ) from error
    if not dist.is_available() or not hasattr(dist, "ProcessGroupGloo"):
        raise CollectivesError("this torch was built without Gloo. Install one from PyPI, or use MPI.")
    key, timeout_s = run_secret(environ), given_s or _START_S
    # A store may be older than this attempt, as with torchrun, so each attempt needs different keys.
    attempt = "/".join(environ.get(name, "") for name in ("PACELINE_ATTEMPT", "TORCHELASTIC_RESTART_COUNT"))
    address, root = _store(dist, environ, rank, host, port, timeout_s)
    return Meeting(
        rank=rank,
        size=size,
        address=address,
        prefix=f"paceline/{attempt}/{size}/{name}",
        where=f"{host}:{port}",
        root=root,
        key=key,
        timeout_s=timeout_s,
        operation_timeout=timedelta(seconds=given_s or _OPERATION_S),
    )


def forget_store(host: str, port: int) -> None:
    """Drop the connection to a store whose server has ended with rank 0."""
    _stores.pop((host, port), None)


def place(environ: Mapping[str, str]) -> tuple[int, int, str, int]:
    """Return this process's rank, the world size, and the key-value store's host and port."""
    texts = [environ.get(name) or environ.get(other, "") for name, other in _VARIABLES.items()]
    rank, size, host, port = texts
    if not rank and not size and environ.get("PACELINE_WORLD_SIZE") == "1":
        return 0, 1, host, 0  # A run of one process needs no launcher.
    if rank.isdecimal() and size.isdecimal() and int(rank) < int(size) and host and port.isdecimal():
        return int(rank), int(size), host, int(port)
    seen = ", ".join(f"{name}={environ[name]!r}" if name in environ else f"{name} missing" for name in _VARIABLES)
    raise CollectivesError(
        f"collectives over Gloo need the variables {', '.join(_VARIABLES)}, which a run with "
        f"distributed_backend='gloo', horovodrun and torchrun set: {seen}. Start the script with one of them."
    )


def _address(value: object, rank: int) -> str:
    try:
        # Validate the address even if it is signed: without a secret, any process may have signed it.
        return str(ipaddress.ip_address(str(value).partition("%")[0])) and str(value)
    except ValueError:
        raise CollectivesError(f"rank {rank} sent the address {value!r}, which is not an IP address.") from None


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _store(
    dist: ModuleType, environ: Mapping[str, str], rank: int, host: str, port: int, timeout_s: float
) -> tuple[str, Store]:
    try:
        if (host, port) not in _stores:
            of_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            is_master = rank == 0 and not of_agent
            _stores[host, port] = store_address.made(
                dist.TCPStore,
                host,
                port,
                is_master=is_master,
                timeout=timedelta(seconds=timeout_s),
                # Don't let torch wait for the other ranks: `wait_for_all` waits for them, and its error names the missing ranks.
                wait_for_workers=False,
                # torch's own rendezvous sets `multi_tenant` as well, so that both share a server.
                multi_tenant=True,
            )
        return links.own_address(host, port), _stores[host, port]
    except (RuntimeError, OSError) as error:
        first = (str(error).splitlines() or [repr(error)])[0]
        raise CollectivesError(
            f"rank {rank} can't reach the store at MASTER_ADDR={host}, MASTER_PORT={port}: {first}. "
            "Is rank 0 running, and the port free of other programs?"
        ) from error


class SignedStore:
    """A part of the key-value store that signs its JSON values.

    The signature covers name and value. So readers detect values that another process wrote or copied from another
    name. Without a secret (torchrun), values are plain JSON: a forged value can be wrong, but runs no code.

    `store` is torch's store, and `prefix` precedes all names. `where` names the store in error messages. `key` is the
    secret, or None.
    """

    def __init__(self, store: Any, prefix: str, where: str, key: bytes | None) -> None:
        self._store, self._prefix, self._where, self._key = store, prefix, where, key

    def set(self, name: str, value: object) -> None:
        """Store a JSON value under this name in the key-value store."""
        self.set_bytes(name, json.dumps(value).encode())

    def get(self, name: str) -> Any:
        """Wait until the key-value store has this name. Return the value."""
        data = self.get_bytes(name)
        try:
            return json.loads(data)
        except ValueError:
            raise CollectivesError(f"{self._described(name)} is not JSON: {data[:40]!r}. {self._advice()}") from None

    def has(self, name: str) -> bool:
        return bool(self._store.check([name]))

    def set_bytes(self, name: str, data: bytes) -> None:
        if self._key is not None:
            data = _SIGNED + tag(self._key, self._purpose(name), data) + data
        self._store.set(name, data)

    def get_bytes(self, name: str) -> bytes:
        """Wait until the key-value store has this name. Return the value's bytes."""
        data = bytes(self._store.get(name))
        is_signed = data.startswith(_SIGNED) and len(data) >= _HEAD_BYTES
        if self._key is None:
            if is_signed:
                raise CollectivesError(
                    f"{self._described(name)} is signed, but this rank was given no {RUN_SECRET_VARIABLE}: another "
                    "launcher started the rank that signed it. Let one launcher start all ranks, with the same environment."
                )
            return data
        if not is_signed:
            raise CollectivesError(f"{self._described(name)} is not signed with the run's secret. {self._advice()}")
        signature, content = data[len(_SIGNED) : _HEAD_BYTES], data[_HEAD_BYTES:]
        if not is_tag(signature, self._key, self._purpose(name), content):
            raise CollectivesError(
                f"{self._described(name)} is signed with another secret than the run's. {self._advice()}"
            )
        return content

    def for_torch(self) -> Store:
        """Return this part of the key-value store as a torch object, for Gloo."""
        # The caller must keep a reference to the returned store, because torch keeps only its C++ part.
        from torch.distributed.distributed_c10d import Store

        class Signed(Store):
            def __init__(self, signed: SignedStore) -> None:
                super().__init__()
                self._signed = signed

            def set(self, key: str, value: str | bytes) -> None:
                self._signed.set_bytes(key, value.encode() if isinstance(value, str) else bytes(value))

            def get(self, key: str) -> bytes:
                return self._signed.get_bytes(key)

            def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
                self._signed._store.wait(keys, *(() if timeout is None else (timeout,)))

            def check(self, keys: list[str]) -> bool:
                return bool(self._signed._store.check(keys))

        return Signed(self)

    def _purpose(self, name: str) -> str:
        return f"store {self._prefix}/{name}"

    def _described(self, name: str) -> str:
        return f"the value {f'{self._prefix}/{name}'!r} in the store at {self._where}"

    def _advice(self) -> str:
        return (
            "Somebody else has written it, or a rank that was started in another way; nothing of it was used. Let one "
            f"launcher start all ranks, and see who reaches the port ({self._where})."
        )


def run_secret(environ: Mapping[str, str] = os.environ) -> bytes | None:
    """Return the secret that the ranks of this run share, or None.

    Some launchers, such as torchrun, give no secret. Then nothing is signed, and each rank trusts any process that
    reaches the rank's port. So does torch.
    """
    text = environ.get(RUN_SECRET_VARIABLE, "")
    if not text:
        return None
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) < _LEAST_SECRET_BYTES:
        raise CollectivesError(
            f"{RUN_SECRET_VARIABLE} holds no secret: it must be {2 * _LEAST_SECRET_BYTES} or more hexadecimal digits, the same "
            "on every rank. Unset it, and let Paceline or horovodrun set it; or make one with `python -c 'import secrets; "
            "print(secrets.token_hex(32))'`."
        )
    return key
