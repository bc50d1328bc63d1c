"""Real runs, a folder for each engine; what several targets do alike is in `everywhere`."""

import pytest

# Let pytest report failures in these modules of checks like failures in tests.
pytest.register_assert_rewrite("tests.engines.beside", "tests.engines.conformance")
