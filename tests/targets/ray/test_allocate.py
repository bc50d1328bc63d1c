from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import EngineError
from paceline.remote.link import LinkError
from paceline.targets.ray import allocate
from paceline.targets.ray.listener import Taken
from paceline.targets.ray.placement_group import LostError


@pytest.mark.promise("how-long-silent-node-waited")
def test_connections_to_ray_nodes_time_out_after_the_silence_limit_of_the_target(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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


def test_nodes_that_keep_dying_raise_engine_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def dies(*asked: Any) -> None:
        tried.append(asked)
        raise LostError("node 0 of the run: SIGKILL.")

    monkeypatch.setattr(allocate, "_gather", dies)
    with pytest.raises(EngineError, match=r"3 times in a row, Ray gave nodes that died at once: node 0"):
        allocate.gather(None, 2, lambda text: False)  # type: ignore[arg-type]
    assert len(tried) == 3
