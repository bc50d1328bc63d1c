"""Conformance suites, for those who write a part of their own: `paceline.testing.targets`. They need pytest."""

import pytest

# The suites' own asserts are to show values as those of a test module do.
pytest.register_assert_rewrite(
    *(f"paceline.testing.{name}" for name in ("bench", "completing", "failing", "ending", "losing"))
)
