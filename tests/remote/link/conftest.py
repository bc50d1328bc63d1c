"""Nodes without machines: agents of this machine, each with a folder of its own that stands for a node's disk."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.job.plan import Node
from paceline.remote.link import AgentNodes, Link, bootstrap_words
from paceline.runs.folder import RunFolder
from paceline.system.detached_process import library_dir
from tests.helpers import make_run, write_tree

OpenLink = Callable[..., Link]


@pytest.fixture
def library(tmp_path: Path) -> Path:
    return library_dir(tmp_path / "ws")


@pytest.fixture
def open_link(tmp_path: Path, library: Path) -> Iterator[OpenLink]:
    """Opens a link to an agent of this machine; all are closed in the end. words: the command line.

    The library is not sent, unless asked for: that takes its time.
    """
    with contextlib.ExitStack() as links:

        def open_one(name: str = "node-0", words: Any = None, **values: Any) -> Link:
            given: dict[str, Any] = {"folder": str(tmp_path / "node"), "library_dir": library, "shared_library": True}
            link = Link.open(words or bootstrap_words(sys.executable), name=name, **(given | values))
            links.callback(link.close)
            return link

        yield open_one


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    """A run of a script with a snapshot, at the supervisor's."""
    snapshot = write_tree(tmp_path / "ws/snapshots/5eed", {"train.py": "print('hello')", "data/a b\n.txt": "x"})
    folder, fd = make_run(tmp_path / "ws/runs")
    import os

    os.close(fd)
    folder.snapshot.symlink_to(snapshot)
    for path in (folder.outputs, folder.checkpoints, folder.metrics, folder.logs):
        path.mkdir(exist_ok=True)
    return folder


@pytest.fixture
def make_nodes(tmp_path: Path, open_link: OpenLink) -> Iterator[Callable[..., AgentNodes]]:
    """Nodes of as many agents; what one sees, all see, for it is one machine, unless `folder` tells them apart."""
    with contextlib.ExitStack() as made:

        def make(count: int = 1, **values: Any) -> AgentNodes:
            links = values.pop("links", None) or [open_link(f"node-{rank}") for rank in range(count)]
            nodes = tuple(
                Node(node_rank=rank, name=link.name, address=f"127.0.0.{rank + 1}", cores=1)
                for rank, link in enumerate(links)
            )
            given: dict[str, Any] = {"folder": str(tmp_path / "node"), "is_shared": False, "ports": 2}
            found = AgentNodes(links, nodes, **(given | values))
            made.callback(found.close)
            return found

        yield make
