"""Servers that are started once, stores on them, and a cache for each test."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.data.stores.datastore import Datastore
from paceline.data.transfer.cache import DataCache
from paceline.data.transfer.fetch import Fetched, fetch
from paceline.job.data_reference import DataReference
from paceline.workspace import Workspace
from tests.data import servers
from tests.engines.conftest import require_engine

_numbers = itertools.count()
#: The kinds of object stores that fixtures take as parameters. `make proof` installs the servers of the last two.
OBJECT_STORES = ("s3", "gcs", "azure")
OTHER_STORES = [pytest.param(kind, marks=pytest.mark.proof) for kind in OBJECT_STORES[1:]]


def has_module(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """An empty workspace. Nothing of the machine's own settings of stores is seen."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("AZURE_TEST", "set by s3_store")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", servers.KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", servers.SECRET)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("PACELINE_DATA_CACHE", str(tmp_path / "cache"))
    return Workspace(tmp_path / "ws")


@pytest.fixture
def cache(tmp_path: Path) -> DataCache:
    return DataCache(tmp_path / "cache", limit_bytes=10**9)


@pytest.fixture
def take(workspace: Workspace, cache: DataCache) -> Callable[..., Fetched]:
    """Fetches a reference, as the first of two nodes with two workers each."""

    def call(reference: DataReference, **values: Any) -> Fetched:
        given: dict[str, Any] = {
            "workspace_dir": workspace.path,
            "cache": cache,
            "view_dir": cache.view_dir("run_1", 0),
            "node_rank": 0,
            "ranks": range(2),
            "node_count": 2,
            "world_size": 4,
        }
        return fetch(reference, **(given | values))

    return call


@pytest.fixture(scope="session")
def _s3() -> Iterator[servers.S3]:
    require_engine("moto's server and s3fs", has_module("moto") and has_module("flask") and has_module("s3fs"))
    server = servers.S3()
    yield server
    server.kill()


@pytest.fixture(params=["obstore", "s3fs"])
def s3(request: pytest.FixtureRequest) -> servers.S3:
    """An S3 server, read by each of the two libraries in turn."""
    return _read_by(request.param, request)


def _read_by(library: str, request: pytest.FixtureRequest) -> servers.S3:
    if library == "obstore":
        require_engine("obstore", has_module("obstore"))
    else:
        for module in ("listing", "reading"):
            patch: pytest.MonkeyPatch = request.getfixturevalue("monkeypatch")
            patch.setattr(f"paceline.data.transfer.{module}.object_store", lambda store: None)
    server: servers.S3 = request.getfixturevalue("_s3")
    return server


@pytest.fixture(scope="session")
def _gcs() -> Iterator[servers.Gcs]:
    if not servers.program("fake-gcs-server") or not has_module("gcsfs"):
        pytest.skip("needs fake-gcs-server and gcsfs, which `make proof` installs")
    server = servers.Gcs()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def _azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Azure]:
    if not servers.program("azurite-blob") or not has_module("adlfs"):
        pytest.skip("needs Azurite and adlfs, which `make proof` installs")
    server = servers.Azure(tmp_path_factory.mktemp("azurite"))
    yield server
    server.kill()


@pytest.fixture(params=["obstore", "s3fs", *OTHER_STORES])
def objects(request: pytest.FixtureRequest) -> servers.S3 | servers.Gcs:
    """A server of each kind of object store."""
    if request.param in ("gcs", "azure"):
        found: servers.Gcs = server_of(request)
        return found
    return _read_by(request.param, request)


def server_of(request: pytest.FixtureRequest) -> Any:
    """Return the server for the kind of store in a fixture's parameter."""
    return request.getfixturevalue(f"_{request.param}")


@pytest.fixture
def s3_once(_s3: servers.S3) -> servers.S3:
    """The S3 server, for tests that do not depend on the library that reads."""
    return _s3


@pytest.fixture
def bucket() -> str:
    """The name of a bucket that no other test has."""
    return f"bucket-{next(_numbers)}"


@pytest.fixture
def proxied() -> Iterator[Callable[..., servers.Proxy]]:
    """Makes a proxy in front of a port."""
    made: list[servers.Proxy] = []

    def call(port: int, spoil: Callable[[servers.Answer], None] = lambda answer: None) -> servers.Proxy:
        made.append(servers.Proxy(port, spoil))
        return made[-1]

    yield call
    for proxy in made:
        proxy.close()


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Sshd]:
    require_engine("sshd", servers.find_sshd())
    require_engine("paramiko", has_module("paramiko"))
    server = servers.Sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.close()


@pytest.fixture
def web(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """An HTTP server with ranges; `folder` holds its files."""
    require_engine("aiohttp", has_module("aiohttp"))
    folder = tmp_path / "web"
    folder.mkdir()
    with servers.http_server(folder) as port:
        yield SimpleNamespace(folder=folder, port=port, url=f"http://127.0.0.1:{port}")


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying again takes no time."""
    monkeypatch.setattr("paceline.data.transfer.transfer._FIRST_DELAY_S", 0.01)
    monkeypatch.setattr("paceline.data.transfer.upload._FIRST_DELAY_S", 0.01)


def s3_store(workspace: Workspace, url: str, place: str, **options: Any) -> Datastore:
    """The store "lab" on this server of S3, GCS or Azure. The variable AZURE_TEST has the account of Azurite."""
    kind = servers.KINDS.get(servers.port_of(url), "s3")
    where: dict[str, Any] = {"url": f"s3://{place}", "options": {"endpoint_url": url, **options}}
    if kind == "gcs":
        where["url"] = f"gs://{place}"
    elif kind == "azure":
        os.environ["AZURE_TEST"] = servers.connection_string(url)
        credentials = {"connection_string": "env:AZURE_TEST"}
        where = {"url": f"az://{place}", "options": options, "credentials": credentials}
    return Datastore.register(workspace, "lab", overwrite=True, **where)
