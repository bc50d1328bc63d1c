"""The description that an agent gives of its node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Hello:
    """A node as its agent found it.

    python: the agent's interpreter and its version. gpus: device numbers. interfaces: name -> (IPv4 address, length of
    the network's prefix). env: the environment that the node gives to a program. time: its clock, seconds since the
    epoch, when it said hello. library: the folder there that holds `paceline`; folder: what `folder` was expanded to.
    """

    host: str
    user: str
    home: str
    python: tuple[str, tuple[int, ...]]
    cores: int
    gpus: tuple[str, ...]
    interfaces: Mapping[str, tuple[str, int]]
    env: Mapping[str, str]
    pid: int
    time: float
    boot_id: str
    library: str
    folder: str

    @classmethod
    def from_frame(cls, header: Mapping[str, Any]) -> Hello:
        values = {name: header[name] for name in cls.__dataclass_fields__}
        path, version = header["python"]
        interfaces = {name: (address, prefix) for name, (address, prefix) in header["interfaces"].items()}
        return cls(
            **{**values, "python": (path, tuple(version)), "gpus": tuple(header["gpus"]), "interfaces": interfaces}
        )
