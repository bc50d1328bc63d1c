"""A kind of compute target for tests: a module that a test can install as a package's entry point."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from paceline.errors import TargetError
from paceline.targets.local import ThisMachine
from paceline.targets.options import Option, check_settings
from paceline.targets.status import NodeStatus, Status


class ToyTarget:
    """Nodes that are made up; `broken` says how."""

    kind: ClassVar[str] = "toy"
    OPTIONS: ClassVar[tuple[Option, ...]] = (
        Option("nodes", "how many nodes", type=int, default=2),
        Option("label", "a text", is_required=True),
        Option(
            "broken",
            "what is wrong",
            choices=("status", "down", "hangs", "nodes", "waits", "nothing"),
            default="nothing",
        ),
        Option("python", "interpreter of scripts"),
    )

    def __init__(self, name: str = kind, settings: Mapping[str, Any] = {}) -> None:
        self.name = name
        self.values = check_settings(self.kind, self.OPTIONS, settings, name)
        #: The settings that a workspace stores.
        self.settings = {**settings, "label": self.values["label"].strip()}
        if self.values["nodes"] < 1:
            raise TargetError(f"nodes={self.values['nodes']} is less than 1. Give 1 or more.")

    def status(self) -> Status:
        if self.values["broken"] == "status":
            raise TargetError("the toy's engine is switched off. Switch it on.")
        if self.values["broken"] == "hangs":
            time.sleep(60)
        nodes = [
            NodeStatus(name=f"toy{index}", cores=4, used_cores=1, gpus=2, used_gpus=2)
            for index in range(self.values["nodes"])
        ]
        if self.values["broken"] == "down":
            nodes = [replace(node, is_up=False, state="down", message="its spring is broken.") for node in nodes]
        return Status(nodes=tuple(nodes), queued=5, running=1)

    @contextlib.contextmanager
    def examine(self, node_count: int | None = None) -> Iterator[list[Any]]:
        if self.values["broken"] == "waits":
            time.sleep(60)
        if self.values["broken"] == "nodes":
            raise TargetError("the toy box is empty.")
        with ThisMachine().examine() as links:
            yield list(links)


class PlainTarget:
    """As plain as a plug-in may be: neither settings nor a status."""
