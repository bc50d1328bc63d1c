"""A node that is a folder of this machine: commands run here, and each thing that can be wrong with a node can be made so."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

import paceline
from paceline.doctor.examination import Examination, Patient
from paceline.remote.link.messages import LinkError
from tests.helpers import free_port

if TYPE_CHECKING:
    from paceline.remote.link.link import Link

LIBRARY = Path(paceline.__file__).resolve().parents[1]


@dataclass
class LocalLink:
    """As `paceline.remote.link.Link`, without an agent.

    root: a folder that stands for the node's `/`, where it does not share this machine's.
    wrong: what the node answers instead of running a command, asked with the command line first; None runs it.
    """

    name: str
    folder: str
    interfaces: Mapping[str, tuple[str, int]] = field(default_factory=lambda: {"lo": ("127.0.0.1", 8)})
    lost: str | None = None
    root: str = ""
    wrong: Callable[[Sequence[str]], Any] = lambda argv: None
    asked: list[list[str]] = field(default_factory=list)
    inputs: list[bytes] = field(default_factory=list)

    @property
    def hello(self) -> Any:
        return SimpleNamespace(
            host=socket.gethostname(),
            user="me",
            cores=2,
            python=(sys.executable, sys.version_info[:3]),
            interfaces=self.interfaces,
            folder=self.folder,
            library=str(LIBRARY),
        )

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float = 60.0) -> Any:
        self.asked.append(list(argv))
        self.inputs.append(input)
        if self.lost:
            raise LinkError(self.lost)
        answer = self.wrong(argv)
        if answer is not None:
            return answer
        try:
            return subprocess.run(argv, input=input, capture_output=True, timeout=timeout_s, check=False)
        except subprocess.TimeoutExpired as error:
            raise LinkError(f"{self.name}: no answer within {timeout_s:g} s.") from error

    def free_ports(self, count: int) -> list[int]:
        return [free_port() for _ in range(count)]

    def exists(self, path: str) -> bool:
        return Path(self.root + path).exists()

    def put_file(self, path: str, data: bytes, mode: int = 0o644) -> None:
        file = Path(self.root + path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)

    def sees(self, path: str, token: str) -> bool:
        file = Path(self.root + path)
        return file.exists() and file.read_text() == token

    def remove(self, path: str) -> None:
        file = Path(self.root + path)
        shutil.rmtree(file) if file.is_dir() else file.unlink()

    def close(self) -> None:
        self.lost = "closed"


def answers(value: str | bytes) -> Any:
    """What a command on a node has printed."""
    return SimpleNamespace(returncode=0, stdout=value if isinstance(value, bytes) else value.encode(), stderr=b"")


def hangs(argv: Sequence[str]) -> Any:
    """Never in this test's time."""
    time.sleep(30)


@pytest.fixture
def two(tmp_path: Path) -> list[LocalLink]:
    """Two nodes, each with a folder of its own, both on this machine's loopback."""
    networks = [{"lo": ("127.0.0.1", 8), "eth0": (f"127.0.1.{number}", 24)} for number in (1, 2)]
    return [LocalLink(f"node{number}", str(tmp_path / f"node{number}"), networks[number]) for number in (0, 1)]


@pytest.fixture
def examination(two: list[LocalLink], tmp_path: Path) -> Examination:
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    return Examination(
        patients=[Patient(cast("Link", link)) for link in two], folder=two[0].folder, workspace_dir=str(workspace)
    )
