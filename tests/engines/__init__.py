"""Real runs, a folder for each engine; what several targets do alike is in `everywhere`."""

import pytest

# Modules of checks, whose failures are reported like those of tests.
pytest.register_assert_rewrite("tests.engines.beside", "tests.engines.conformance")
