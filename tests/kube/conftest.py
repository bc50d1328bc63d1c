"""Fixtures for tests on a real Kubernetes: the cluster that `make kube` starts, or a namespace of somebody's own.

Without `make kube`, which sets PACELINE_KUBE, tests marked `kube` are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kube import programs
from tests.kube.cluster import ADMIN, EDITOR, NARROW, Access, Cluster, running
from tests.kube.lab import KubeLab

#: "here", or the kubeconfig of a real cluster. Read this variable on import, because a fixture later removes it.
_WHERE = os.environ.get("PACELINE_KUBE", "")
_IMAGE = os.environ.get("PACELINE_KUBE_IMAGE") or "python:3.12-slim"
_HERE = "here"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.get_closest_marker("kube"):
            continue
        if not _WHERE:
            item.add_marker(pytest.mark.skip(reason="needs a Kubernetes cluster: `make kube` starts one"))
        elif _WHERE != _HERE and "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.skip(reason="needs control of the nodes, which `make kube` alone has"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A test that failed says what the cluster has done, whose folder is gone with the tests."""
    report = yield
    found = getattr(item, "funcargs", {}).get("cluster")
    if report.when == "call" and report.failed and isinstance(found, Cluster):
        report.sections.append(("Kubernetes", found.told()))
    return report


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A cluster of three nodes on this machine, for tests that need control of it."""
    lacking = programs.missing()
    assert lacking is None, f"the cluster needs {lacking}"
    with running() as found:
        yield found


@pytest.fixture(scope="session")
def access(request: pytest.FixtureRequest) -> Access:
    """A namespace of either cluster."""
    if _WHERE == _HERE:
        found: Cluster = request.getfixturevalue("cluster")
        return found
    file = Path(_WHERE).resolve()
    words = ["config", "view", f"--kubeconfig={file}", "--minify", "--output=json"]
    shown = subprocess.run([*programs.kubectl(), *words], capture_output=True, text=True, check=True).stdout
    namespace = json.loads(shown)["contexts"][0]["context"].get("namespace", "default")
    # A real cluster has one user for all roles. Only the cluster on this machine tests the differences between roles.
    return Access(dict.fromkeys((ADMIN, EDITOR, NARROW), file), namespace=namespace, image=_IMAGE)


@pytest.fixture
def lab(access: Access, tmp_path: Path) -> Iterator[KubeLab]:
    """A workspace with the cluster as a compute target. In the end no object of its runs may be left."""
    found = KubeLab(tmp_path, access)
    yield found
    found.close()
