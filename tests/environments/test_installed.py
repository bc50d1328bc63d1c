"""The requirements of a list that installed distributions do not satisfy."""

from __future__ import annotations

import json

import pytest
from packaging.requirements import Requirement

from paceline.environments.base import Base
from paceline.environments.installed import Visible, name_of_project
from tests.environments.wheels import make_wheel, unpack
from tests.helpers import write_tree


def base(version="3.11.7"):
    return Base(
        **{"python": "/p", "prefix": "/", "version": version, "implementation": "cpython", "platform": "linux-x86_64"},
        site_folders=(),
        user_folder=None,
    )


@pytest.fixture
def folder(tmp_path):
    """a 1.0 (needs b>=2; with the extra x: c), b 2.1rc1, d 1.0 (needs e, which there is not)."""
    for name, version, requires in (
        ("a", "1.0", ["b>=2", 'c; extra == "x"', 'nowhere; sys_platform == "win32"', "old; python_version < '3.9'"]),
        ("b", "2.1rc1", []),
        ("d", "1.0", ["e>1"]),
        ("With-Dash", "1.0+local", []),
    ):
        unpack(make_wheel(tmp_path / "wheels", name, version, requires), tmp_path / "site")
    return tmp_path / "site"


@pytest.mark.parametrize(
    ("asked", "missing"),
    [
        (["a"], []),
        (["A>=1", "b"], []),
        (["with_dash==1.0"], []),
        (["a>1"], ["a>1"]),
        (["a[x]"], ["c"]),
        (["d"], ["e>1"]),
        (["unknown", "a"], ["unknown"]),
        (["unknown; python_version < '3'"], []),
        (["unknown>=2; python_version > '3'"], ["unknown>=2"]),
        (["b===nonsense"], ["b===nonsense"]),
        (["a @ https://host/a.whl"], ["a@ https://host/a.whl"]),
    ],
)
def test_missing_requirements_are_found_transitively(folder, asked, missing):
    found = Visible([folder], base()).missing([Requirement(text) for text in asked])
    assert [str(each).replace(" @", "@") for each in found] == missing


def test_requirement_markers_are_evaluated_for_the_version_of_the_base_python(folder):
    assert [str(each) for each in Visible([folder], base("3.8.2")).missing([Requirement("a")])] == ["old"]


def test_installed_package_that_violates_a_constraint_counts_as_missing(folder):
    visible = Visible([folder], base())
    assert visible.missing([Requirement("a")], [Requirement("b<3"), Requirement("zzz<1")]) == []
    assert [str(each) for each in visible.missing([Requirement("a")], [Requirement("b<2.1.dev0")])] == ["b>=2"]


def test_first_folder_with_a_package_determines_its_version(folder, tmp_path):
    unpack(make_wheel(tmp_path / "wheels", "b", "3.0"), tmp_path / "layer")
    assert Visible([tmp_path / "layer", folder], base()).found["b"].version == "3.0"
    assert Visible([folder, tmp_path / "layer"], base()).found["b"].version == "2.1rc1"


@pytest.mark.parametrize("place", ["", " @ https://host/it.whl"], ids=["names", "URLs"])
def test_search_for_missing_requirements_terminates_on_circular_dependencies(tmp_path, place):
    for name, other in (("x", "y"), ("y", "x")):
        unpack(make_wheel(tmp_path / "wheels", name, "1", [f"{other}{place}"]), tmp_path / "site")
    assert Visible([tmp_path / "site"], base()).missing([Requirement("x")]) == []


def test_url_requirement_given_by_the_user_and_by_a_dependency_is_listed_once_as_missing(folder):
    unpack(make_wheel(folder.parent / "wheels", "f", "1", ["b @ https://host/b.whl"]), folder)
    asked = [Requirement("f"), Requirement("b @ https://host/b.whl")]
    for order in (asked, asked[::-1]):
        assert [each.url for each in Visible([folder], base()).missing(order)] == ["https://host/b.whl"]


def test_package_with_broken_metadata_is_listed_without_a_version(folder):
    write_tree(folder / "odd-1.dist-info", {"METADATA": "Name: odd\nVersion: not a version\nRequires-Dist: (((\n"})
    write_tree(folder / "empty-1.dist-info", {"METADATA": ""})
    visible = Visible([folder], base())
    assert [str(each) for each in visible.missing([Requirement("odd"), Requirement("odd>=1")])] == ["odd>=1"]


def test_package_with_an_unsatisfied_requirement_is_reported_as_broken(folder):
    broken = Visible([folder], base()).broken(["a", "d"])
    assert [(name, str(requirement)) for name, requirement in broken] == [("d", "e>1")]


@pytest.mark.parametrize(
    ("origin", "lock"),
    [
        (None, "b==2.1rc1"),
        ({"url": "https://h/b.whl", "archive_info": {"hashes": {"sha256": "00"}}}, "b @ https://h/b.whl#sha256=00"),
        ({"url": "https://h/b.whl", "archive_info": {}}, "b @ https://h/b.whl"),
        ({"url": "file:///my%20pkg", "dir_info": {}}, "b @ file:///my%20pkg"),
        ({"url": "file:///my%20pkg", "dir_info": {"editable": True}}, "-e /my pkg"),
        ({"url": "https://h/r.git", "vcs_info": {"vcs": "git", "commit_id": "c0"}}, "b @ git+https://h/r.git@c0"),
        (
            {"url": "https://h/r.git", "vcs_info": {"vcs": "git", "commit_id": "c0"}, "subdirectory": "s"},
            "b @ git+https://h/r.git@c0#subdirectory=s",
        ),
    ],
)
def test_lock_records_the_origin_of_a_package(folder, origin, lock):
    if origin is not None:
        (folder / "b-2.1rc1.dist-info" / "direct_url.json").write_text(json.dumps(origin))
    assert Visible([folder], base()).locks(["b==2.1rc1"]) == (lock,)


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({"pyproject.toml": "[project]\nname = 'My_Pkg'\n"}, "my-pkg"),
        ({"setup.cfg": "[metadata]\nname = My.Pkg\n", "pyproject.toml": "[build-system]\n"}, "my-pkg"),
        ({"setup.py": "setup(name='x')"}, None),
        ({"pyproject.toml": "not toml"}, None),
        ({"pyproject.toml": "project = 3"}, None),
        ({"setup.cfg": "no section"}, None),
    ],
)
def test_project_name_is_read_from_its_metadata(tmp_path, files, name):
    write_tree(tmp_path, files)
    assert name_of_project(tmp_path) == name
