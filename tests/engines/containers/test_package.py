"""A packaged service, built and served by podman."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.workspace import Workspace
from tests.engines.conftest import require_engine
from tests.engines.container_lab import WITH_MPI, Podman, free_ports, host_folders
from tests.helpers import wait_until, write_tree
from tests.services.conftest import SCRIPT


@pytest.fixture
def podman(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Podman]:
    """An engine whose image has this machine's Python with all that is installed for it: nothing comes from a network."""
    engine = Podman(tmp_path_factory.mktemp("podman"), (WITH_MPI,))
    why = engine.start()
    try:
        require_engine(f"podman: {why}", why is None)
        yield engine
    finally:
        engine.stop()


@pytest.mark.promise("packaged-service-built-serves-container")
def test_model_package_is_built_as_an_image_and_answers_requests(podman: Podman, tmp_path: Path) -> None:
    write_tree(tmp_path / "src", {"score.py": SCRIPT, "two.txt": "2"})
    folder = Workspace(tmp_path / "ws").package(
        tmp_path / "src" / "two.txt", tmp_path / "away", entry_script=tmp_path / "src" / "score.py", base=WITH_MPI
    )
    volumes = [f"--volume={path}:{path}:ro" for path in host_folders()]
    built = podman(
        "build", "--pull=never", "--network=host", "--format=docker", *volumes, "-t", "served:1", str(folder)
    )
    assert built.returncode == 0, built.stdout + built.stderr
    [port] = free_ports(1)
    # Run as root, because other users may not be able to read the folder of this machine's Python.
    started = podman(
        *("run", "--detach", "--rm", "--name=served", "--pull=never", "--network=host", "--user=0"),
        *("-e", "PACELINE_KEY=a-long-random-key", "served:1"),
        *("python", "start.py", "--host", "0.0.0.0", "--port", str(port)),
    )
    assert started.returncode == 0, started.stderr

    def ask() -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/score", b'{"x": [1, 2]}', {"Authorization": "Bearer a-long-random-key"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.loads(answer.read())["y"]
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            pass
        return None

    wait_until(lambda: ask() is not None, f"it answers: {podman('logs', 'served').stderr}", 60)
    assert ask() == [2, 4]
    checked = podman("exec", "served", "python", "start.py", "--check", "--port", str(port))
    assert checked.returncode == 0, checked.stderr
    assert podman("stop", "--time", "60", "served").returncode == 0
    wait_until(lambda: podman.containers() == [], "the container is gone")
