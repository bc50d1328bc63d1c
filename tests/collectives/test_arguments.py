"""What can't be done is refused on the rank that asks for it, with words that say what can."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import numpy, sys
from paceline import collectives
engine = collectives.start()
words, numbers = numpy.array(["a"]), numpy.ones(2, numpy.uint16)
for call in (
    lambda: engine.allreduce("a", numbers, op="mean"),
    lambda: engine.allreduce("a", words),
    lambda: engine.allreduce("a", numpy.ones(2, complex), op="max"),
    lambda: engine.allreduce("a", numbers, op="adasum"),
    lambda: engine.broadcast("a", numbers, root=1),
    lambda: engine.allgather("a", numpy.float32(1).reshape(())),
    lambda: engine.grouped_allreduce("a", []),
    lambda: engine.allreduce("a", numbers, process_set=7),
):
    try:
        call()
    except collectives.ArgumentError as error:
        print(error)
engine.allreduce("a", numbers, op="adasum", dtype="bfloat16").wait()
collectives.stop()
"""


@pytest.fixture(scope="module")
def refusals() -> list[str]:
    pytest.importorskip("numpy")
    pytest.importorskip("mpi4py")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("number", "words"),
    list(
        enumerate(
            (
                "op='mean' is unknown. The operations are sum, average",
                "can't be reduced: give numbers",
                "they have no order",
                "op='adasum' is for floating-point arrays",
                "root=1 is no rank of process set 0",
                "allgather",
                "got no arrays. Give at least one",
                "process set 7",
            )
        )
    ),
)
def test_it_is_refused_with_what_can_be_done(refusals: list[str], number: int, words: str) -> None:
    assert words in refusals[number]
