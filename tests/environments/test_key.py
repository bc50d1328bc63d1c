"""Equal content, equal key; other content, another."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.environments.base import Base
from paceline.environments.environment import Environment
from paceline.environments.key import key, moved, paths_of
from paceline.errors import EnvironmentSpecError
from tests.helpers import write_tree

BASE = Base(
    python="/base/bin/python",
    prefix="/base",
    version="3.11.7",
    implementation="cpython",
    platform="linux-x86_64",
    site_folders=(),
    user_folder=None,
)

MADE = Environment(
    pip_packages=("/w/a-1.0-py3-none-any.whl", "-e /src/b[x]", "einops>=0.8", "c @ file:///w/c.zip"),
    pip_requirements=(
        "--find-links /w/links\n--index-url https://host/simple\n/src/d ; python_version > '3'\ne==1 --hash=sha256:ab\n"
    ),
    pip_constraints=("f<2",),
    conda_packages=("g",),
    conda_channels=("conda-forge", "file:///channel"),
)


def key_of(**values):
    return key(Environment(**values), BASE)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"pip_packages": ["a", "b"]}, {"pip_packages": ["b", "a"]}),
        ({"pip_packages": ["a", "a"]}, {"pip_packages": ["a"]}),
        ({"pip_packages": ["Foo_Bar >= 1 , <2"]}, {"pip_packages": ["foo-bar<2,>=1"]}),
        ({"pip_packages": ["a[y,x]"]}, {"pip_packages": ["a[x,y]"]}),
        ({"pip_packages": ["a", "b==1"]}, {"pip_requirements": "# both\nb==1\n\na\n"}),
        (
            {"pip_packages": ["a"], "pip_constraints": ["b<2", "C"]},
            {"pip_packages": ["a"], "pip_constraints": ["c", "b<2"]},
        ),
        ({"conda_packages": ["a  >=1", "b"]}, {"conda_packages": ["b", "a >=1"]}),
        (
            {"pip_packages": ["a"]},
            {"pip_packages": ["a"], "name": "n", "version": 2, "environment_variables": {"A": "1"}},
        ),
        ({"pip_packages": ["a"], "conda_channels": ["x"]}, {"pip_packages": ["a"]}),
    ],
)
def test_equivalent_environments_share_a_cache_key(one, other):
    assert key_of(**one) == key_of(**other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"pip_packages": ["a"]}, {"pip_packages": ["b"]}),
        ({"pip_packages": ["a"]}, {"pip_packages": ["a[x]"]}),
        ({"pip_packages": ["a"]}, {"pip_packages": ["a; python_version>'3'"]}),
        ({"pip_packages": ["a"]}, {"conda_packages": ["a"]}),
        ({"pip_packages": ["a"]}, {"pip_packages": ["a"], "layered": True}),
        ({"pip_packages": ["a"]}, {"pip_packages": ["a"], "pip_constraints": ["b<2"]}),
        ({"pip_packages": ["a"]}, {"pip_packages": ["a"], "locked_pip": ["a==1"]}),
        ({"pip_packages": ["a"]}, {"pip_packages": ["a"], "pip_requirements": "--pre"}),
        ({"pip_requirements": "-i https://a\n-i https://b\nx"}, {"pip_requirements": "-i https://b\n-i https://a\nx"}),
        ({"pip_requirements": "a==1 --hash=sha256:0"}, {"pip_requirements": "a==1 --hash=sha256:1"}),
        ({"conda_packages": ["a"]}, {"conda_packages": ["a"], "conda_channels": ["x"]}),
        (
            {"conda_packages": ["a"], "conda_channels": ["x", "y"]},
            {"conda_packages": ["a"], "conda_channels": ["y", "x"]},
        ),
        ({"conda_packages": ["a"]}, {"conda_packages": ["a"], "python_version": "3.11"}),
    ],
)
def test_different_environments_have_different_cache_keys(one, other):
    assert key_of(**one) != key_of(**other)


@pytest.mark.parametrize("field", ["python", "version", "implementation", "platform"])
def test_environment_cache_key_depends_on_the_interpreter(field):
    asked = Environment(pip_packages=["a"])
    assert key(asked, replace(BASE, **{field: "other"})) != key(asked, BASE)


def test_packages_of_the_base_interpreter_change_only_cache_keys_of_layered_environments(tmp_path):
    (tmp_path / "a-1.dist-info").mkdir()
    base = replace(BASE, site_folders=(str(tmp_path),))
    layer, whole = Environment(pip_packages=["a"], layered=True), Environment(pip_packages=["a"])
    before = key(layer, base), key(whole, base)
    (tmp_path / "a-1.dist-info").rename(tmp_path / "a-2.dist-info")
    after = key(layer, base), key(whole, base)
    assert before[0] != after[0]
    assert before[1] == after[1]


@pytest.mark.parametrize(
    ("change", "counts"),
    [
        ({"pkg/module.py": "2"}, True),
        ({"pkg/new.py": ""}, True),
        ({"pkg/.git/HEAD": "x"}, False),
        ({"pkg/__pycache__/module.pyc": "x"}, False),
        ({"pkg/build/lib/module.py": "x"}, False),
        ({"pkg/inner/build/module.py": "x"}, True),
        ({"pkg/pkg.egg-info/PKG-INFO": "x"}, False),
    ],
)
def test_environment_cache_key_ignores_build_leftovers_in_a_source_folder(tmp_path, change, counts):
    write_tree(tmp_path, {"pkg/pyproject.toml": "", "pkg/module.py": "1"})
    before = key_of(pip_packages=[str(tmp_path / "pkg")])
    write_tree(tmp_path, change)
    assert (key_of(pip_packages=[str(tmp_path / "pkg")]) != before) is counts


@pytest.mark.parametrize(("changed", "counts"), [("module.py", False), ("pyproject.toml", True)])
def test_environment_cache_key_of_an_editable_install_depends_only_on_build_files(tmp_path, changed, counts):
    write_tree(tmp_path, {"pkg/pyproject.toml": "", "pkg/module.py": "1"})
    before = key_of(pip_packages=[f"-e {tmp_path}/pkg"])
    (tmp_path / "pkg" / changed).write_text("# 2")
    assert (key_of(pip_packages=[f"-e {tmp_path}/pkg"]) != before) is counts


def test_environment_cache_key_depends_on_the_content_of_a_wheel(tmp_path):
    wheel = tmp_path / "x-1-py3-none-any.whl"
    wheel.write_bytes(b"1")
    before = key_of(pip_packages=[str(wheel)])
    wheel.write_bytes(b"2")
    assert key_of(pip_packages=[str(wheel)]) != before


def test_computing_an_environment_cache_key_does_not_hang_on_pipes_and_symlink_loops(tmp_path):
    write_tree(tmp_path, {"pkg/pyproject.toml": ""})
    os.mkfifo(tmp_path / "pkg" / "pipe")
    (tmp_path / "pkg" / "dangling").symlink_to("/nowhere")
    (tmp_path / "pkg" / "loop").symlink_to(tmp_path / "pkg")
    assert key_of(pip_packages=[str(tmp_path / "pkg")])


def test_missing_local_package_path_is_named_in_the_error(tmp_path):
    asked = Environment(pip_packages=[f"{tmp_path}/gone"])
    with pytest.raises(EnvironmentSpecError, match=r"there is no '.*/gone'"):
        key(asked, BASE)


def test_each_local_path_of_an_environment_is_listed_once() -> None:
    assert paths_of(MADE) == [
        Path(path) for path in ("/w/a-1.0-py3-none-any.whl", "/src/b", "/w/c.zip", "/w/links", "/src/d", "/channel")
    ]
    assert paths_of(Environment(pip_packages=("einops", "torch @ https://host/torch.whl"))) == []


def test_moving_an_environment_to_another_machine_replaces_only_paths_of_local_files() -> None:
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
