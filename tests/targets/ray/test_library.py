from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.system.library import library_dir
from paceline.targets.ray import library
from tests.targets.ray.fake_cluster import FakeCluster
from tests.targets.ray.test_client import client


def test_the_library_is_packed_for_the_first_run_alone(
    cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[Any] = []
    monkeypatch.setattr(library, "packed_library", lambda folder: packed.append(folder) or b"zip")
    folder = library_dir(tmp_path)
    uri = library.send_library(client(cluster), folder)
    assert library.send_library(client(cluster), folder) == uri
    assert packed == [folder]
    assert cluster.packages == {uri.removeprefix("gcs://"): b"zip"}
