"""Packages whose build from source can be watched and held up."""

from __future__ import annotations

import zipfile
from pathlib import Path

from tests.environments.wheels import make_wheel

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


def make_source(folder: Path, name: str, version: str = "1.0") -> Path:
    """A package's source folder. It notes each build in `<folder>/builds`, and builds no further while `<folder>/hold` is
    there; with `<folder>/broken` its build fails."""
    source = folder / name
    source.mkdir(parents=True)
    (source / "pyproject.toml").write_text(
        f'[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        f'[project]\nname = "{name}"\nversion = "{version}"\n'
    )
    with zipfile.ZipFile(make_wheel(folder / "wheel", name, version)) as wheel:
        files = {member: wheel.read(member).decode() for member in wheel.namelist()}
    (source / "backend.py").write_text(_BACKEND.format(watch=str(folder), name=name, version=version, files=files))
    return source
