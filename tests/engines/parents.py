"""Values of `parent` in `make test`, for tests whose code is the same below each kind of parent.

The other one is left to `make proof`. Streams, signals and ends differ by the parent, and are tested below both.
"""

from __future__ import annotations

import pytest

_PROOF = pytest.mark.proof
BELOW_THE_SUPERVISOR = pytest.mark.parametrize("parent", ["single", pytest.param("mpi", marks=_PROOF)], indirect=True)
#: The parent process of the workers in a test: mpirun. Only `make proof` also uses the supervisor as their parent.
BELOW_MPIRUN = pytest.mark.parametrize("parent", [pytest.param("single", marks=_PROOF), "mpi"], indirect=True)
