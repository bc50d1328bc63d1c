from __future__ import annotations

import sys
from importlib import metadata

import pytest

from paceline.system import plugins
from paceline.system.plugins import version_of
from tests.helpers import write_tree

OWN = {"own": "collections:OrderedDict"}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package with a plug-in `theirs`, and with one whose name Paceline uses itself."""
    points = "[paceline.test]\ntheirs = bakery:Bread\nown = bakery:Bread\nbroken = nowhere:Bread\n"
    write_tree(
        tmp_path / "site",
        {
            "bakery.py": "class Bread: pass\n",
            "bakery-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: bakery\nVersion: 1.0\n",
            "bakery-1.0.dist-info/entry_points.txt": points,
        },
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield
    sys.modules.pop("bakery", None)


def test_plugin_of_an_installed_package_is_loaded(installed):
    assert type(plugins.load("paceline.test", OWN, "theirs")).__name__ == "Bread"


def test_plugins_of_paceline_take_precedence_over_installed_ones(installed):
    assert type(plugins.load("paceline.test", OWN, "own")).__name__ == "OrderedDict"


def test_unknown_plugin_loads_as_none(installed):
    assert plugins.load("paceline.test", OWN, "nothing") is None
    assert plugins.load("paceline.elsewhere", OWN, "theirs") is None


def test_plugin_names_are_listed_once(installed):
    assert plugins.names("paceline.test", OWN) == ["broken", "own", "theirs"]


def test_plugin_of_paceline_is_loaded_without_reading_package_entry_points(monkeypatch):
    # Reading the entry points of a large environment takes a tenth of a second and more, so this test forbids it.
    monkeypatch.setattr(plugins, "installed", lambda group: pytest.fail("looked"))
    assert plugins.load("paceline.test", OWN, "own") is not None


def test_version_of_returns_the_version_of_an_installed_distribution_or_none():
    assert version_of("pytest") == metadata.version("pytest")
    assert version_of("no-such-distribution") is None
