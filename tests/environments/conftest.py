"""A folder of wheels in place of an index, a base interpreter with a few of them, and a store for each test."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.environments.built import Built
from paceline.environments.environment import Environment
from paceline.environments.store import EnvironmentStore
from tests.environments.channel import Channel, make_channel
from tests.environments.wheels import make_wheel, unpack


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """small 1.0, 1.1; chained (needs small>=1.1); heavy 2.0, 3.0 (needs small); modern (needs heavy>=3); optional (an extra)."""
    folder = tmp_path_factory.mktemp("wheels")
    make_wheel(folder, "small", "1.0")
    make_wheel(
        folder, "small", "1.1", programs={"small-says": "small:say"}, code="def say():\n    print('small says')\n"
    )
    make_wheel(folder, "chained", "1.0", ["small>=1.1"])
    make_wheel(folder, "heavy", "2.0", ["small"])
    make_wheel(folder, "heavy", "3.0", ["small"])
    make_wheel(folder, "beside-heavy", "1.0", ["heavy>=1"])
    make_wheel(folder, "modern", "1.0", ["heavy>=3"])
    make_wheel(folder, "optional", "1.0", ['small; extra == "more"', 'chained; extra == "more"'])
    make_wheel(folder, "for-windows", "1.0", ['nowhere>=1; sys_platform == "win32"'])
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The caches of uv and rattler, apart from the user's."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def index(wheels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip is configured to take packages from `wheels` alone."""
    for name in list(os.environ):
        if name.startswith(("PIP_", "UV_", "CONDA_", "VIRTUAL_ENV")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("UV_CACHE_DIR", str(cache / "uv"))
    monkeypatch.setenv("RATTLER_CACHE_DIR", str(cache / "rattler"))
    return wheels


@pytest.fixture(scope="session")
def base_python(tmp_path_factory: pytest.TempPathFactory, wheels: Path) -> str:
    """The interpreter of a venv that has small 1.0 and heavy 2.0, and, through a .pth file, editable 1.0."""
    prefix = tmp_path_factory.mktemp("base") / "the venv"
    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", prefix], check=True)
    site_packages = next(prefix.glob("lib/*/site-packages"))
    unpack(wheels / "small-1.0-py3-none-any.whl", site_packages)
    unpack(wheels / "heavy-2.0-py3-none-any.whl", site_packages)
    source = prefix / "editable source"
    source.mkdir()
    (source / "editable.py").write_text("VERSION = '1.0'\n")
    (site_packages / "editable.pth").write_text(f"{source}\n")
    info = site_packages / "editable-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: editable\nVersion: 1.0\n")
    return str(prefix / "bin" / "python")


@pytest.fixture
def store(tmp_path: Path) -> EnvironmentStore:
    return EnvironmentStore(tmp_path / "work space" / "environments")


@pytest.fixture(scope="session")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Channel:
    """See `make_channel`. Its path has a blank in it."""
    return make_channel(tmp_path_factory.mktemp("conda") / "the channel")


@pytest.fixture
def ensure(store: EnvironmentStore, base_python: str) -> Callable[..., tuple[Built, list[str]]]:
    """Build an environment of these values over `base_python`. Return it with the printed lines."""

    def build(**values: Any) -> tuple[Built, list[str]]:
        said: list[str] = []
        return store.ensure(Environment(**values), base_python, said.append), said

    return build


def versions(built: Built, *modules: str) -> dict[str, str]:
    """module -> VERSION, as the environment's interpreter imports them; "-" for one that it does not have."""
    code = (
        "import sys, importlib\nfor name in sys.argv[1:]:\n"
        "    try: print(name, importlib.import_module(name).VERSION)\n"
        "    except ImportError: print(name, '-')"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | dict(built.variables)
    done = subprocess.run(
        [built.python, "-c", code, *modules], env=environment, capture_output=True, text=True, check=True
    )
    return dict(line.split() for line in done.stdout.splitlines())
