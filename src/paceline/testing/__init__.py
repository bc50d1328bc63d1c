"""Tools for authors of plugins: the conformance suite `paceline.testing.targets`, and the simulated target `sim`.

The suite needs pytest; simulated nodes don't.
"""

import sys

# Let pytest rewrite the asserts of the checks, so that failures show values. Supervisors of simulated nodes don't load pytest.
if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite(
        *(f"paceline.testing.{name}" for name in ("bench", "completing", "failing", "ending", "losing"))
    )
