"""Conformance suites for plugin authors: `paceline.testing.targets`.

They need pytest.
"""

import pytest

# Rewrite the suites' asserts, so that failures show values.
pytest.register_assert_rewrite(
    *(f"paceline.testing.{name}" for name in ("bench", "completing", "failing", "ending", "losing"))
)
