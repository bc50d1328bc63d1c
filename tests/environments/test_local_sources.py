"""Folders and archives that environments are made from."""

from __future__ import annotations

from pathlib import Path

from paceline.environments.environment import Environment
from paceline.environments.local_sources import moved, paths_of

MADE = Environment(
    pip_packages=("/w/a-1.0-py3-none-any.whl", "-e /src/b[x]", "einops>=0.8", "c @ file:///w/c.zip"),
    pip_requirements=(
        "--find-links /w/links\n--index-url https://host/simple\n/src/d ; python_version > '3'\ne==1 --hash=sha256:ab\n"
    ),
    pip_constraints=("f<2",),
    conda_packages=("g",),
    conda_channels=("conda-forge", "file:///channel"),
)


def test_each_place_is_found_once() -> None:
    assert paths_of(MADE) == [
        Path(path) for path in ("/w/a-1.0-py3-none-any.whl", "/src/b", "/w/c.zip", "/w/links", "/src/d", "/channel")
    ]
    assert paths_of(Environment(pip_packages=("einops", "torch @ https://host/torch.whl"))) == []


def test_places_change_and_nothing_else_does() -> None:
    there = moved(MADE, lambda path: Path("/there") / path.name)
    assert there.pip_packages == (
        "/there/a-1.0-py3-none-any.whl",
        "-e /there/b[x]",
        "einops>=0.8",
        "c @ file:///there/c.zip",
    )
    assert there.pip_requirements == (
        "--find-links /there/links\n--index-url https://host/simple\n/there/d ; python_version > '3'\n"
        "e==1 --hash=sha256:ab\n"
    )
    assert (there.pip_constraints, there.conda_channels) == (("f<2",), ("conda-forge", "file:///there/channel"))
    assert moved(MADE, lambda path: path) == MADE
