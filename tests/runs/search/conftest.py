"""Fixtures of the page's tests, for tests of the index that the page uses."""

from tests.ui.conftest import place  # noqa: F401 - a fixture
