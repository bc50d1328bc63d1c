"""For tests of what is the same code below each kind of parent: which of `parent`'s values they have in `make test`.

The other one is left to `make proof`. Streams, signals and ends differ by the parent, and are tested below both.
"""

from __future__ import annotations

import pytest

_PROOF = pytest.mark.proof
BELOW_THE_SUPERVISOR = pytest.mark.parametrize("parent", ["single", pytest.param("mpi", marks=_PROOF)], indirect=True)
#: Where several ranks are what matters.
BELOW_MPIRUN = pytest.mark.parametrize("parent", [pytest.param("single", marks=_PROOF), "mpi"], indirect=True)
