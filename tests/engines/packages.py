"""Packages that tests install without a network: wheels, and sources whose build can be watched and held up."""

from __future__ import annotations

import zipfile
from pathlib import Path

_BACKEND = """\
import os, pathlib, time, zipfile

def get_requires_for_build_wheel(config_settings=None):
    return []

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    watch = pathlib.Path({watch!r})
    with open(watch / "builds", "a") as file:
        file.write("built\\n")
    (watch / "started").touch()
    print("building {name} now", flush=True)
    while (watch / "hold").exists():
        time.sleep(0.02)
    if (watch / "broken").exists():
        raise RuntimeError("the compiler of {name} is missing")
    name = "{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w") as wheel:
        for path, text in {files!r}.items():
            wheel.writestr(path, text)
    return name
"""


def make_wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> Path:
    """A wheel of one module `<name>` with `VERSION` in it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for member, text in wheel_files(name, version, requires).items():
            wheel.writestr(member, text)
    return path


def make_source(folder: Path, name: str, version: str = "1.0") -> Path:
    """A package's source folder. It notes each build in `<folder>/builds`, and builds no further while `<folder>/hold` is
    there; with `<folder>/broken` its build fails."""
    source = folder / name
    source.mkdir(parents=True)
    (source / "pyproject.toml").write_text(
        f'[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        f'[project]\nname = "{name}"\nversion = "{version}"\n'
    )
    files = wheel_files(name, version, ())
    (source / "backend.py").write_text(_BACKEND.format(watch=str(folder), name=name, version=version, files=files))
    return source


def wheel_files(name: str, version: str, requires: tuple[str, ...]) -> dict[str, str]:
    info = f"{name}-{version}.dist-info"
    required = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    return {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{required}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
    }
