from __future__ import annotations

from importlib import metadata

from paceline.system.installed import version_of


def test_what_is_installed_has_a_version_and_nothing_else_has_one():
    assert version_of("pytest") == metadata.version("pytest")
    assert version_of("no-such-distribution") is None
