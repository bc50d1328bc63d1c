from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import EngineError
from paceline.remote.link import LinkError
from paceline.targets.ray import allocate
from paceline.targets.ray.listener import Taken


def test_each_link_waits_as_long_as_the_target_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[float] = []

    def refuse(sock: socket.socket, *, name: str, silence_s: float, **_: Any) -> None:
        asked.append(silence_s)
        raise LinkError(f"{name}: no")

    monkeypatch.setattr(allocate.Link, "over", refuse)
    pair = socket.socketpair()
    taken = {rank: Taken(sock=sock, told={"hostname": f"n{rank}"}) for rank, sock in enumerate(pair)}
    with pair[0], pair[1], pytest.raises(EngineError, match="a node that Ray has given can't be used: n0: no"):
        allocate.open_links(taken, tmp_path, "/tmp/x", shared_library=True, silence_s=6.0)
    assert asked == [6.0, 6.0]
