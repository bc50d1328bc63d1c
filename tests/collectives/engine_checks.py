"""What test_engine.py runs on several ranks: every check, one after the other, in one world."""

from __future__ import annotations

import functools
import random

import numpy

from paceline import collectives

DTYPES = ("float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool", "complex64")
LONG = (1100, 1000)
SHAPES = ((), (0,), (1,), (3, 5), (2, 0, 3), (70000,), LONG)


def value(rank: int, seed: int, shape: tuple[int, ...], dtype: str) -> numpy.ndarray:
    # Draw bytes and convert them, because drawing int64 takes twice as long.
    return numpy.random.default_rng((seed, rank)).integers(0, 4, shape, numpy.uint8).astype(dtype)


# Each check runs twice, and the second time it needs the same arrays.
@functools.cache
def wanted_of(size: int, seed: int, shape: tuple[int, ...], dtype: str, op: str) -> numpy.ndarray:
    functions = {"sum": numpy.add, "min": numpy.minimum, "max": numpy.maximum, "product": numpy.multiply}
    wanted = value(0, seed, shape, dtype)
    for rank in range(1, size):
        wanted = functions[op](wanted, value(rank, seed, shape, dtype))
    return wanted


def reductions(engine: collectives.Engine) -> None:
    cases = [(d, s, op) for d in DTYPES for s in SHAPES for op in ("sum", "min", "max", "product")]
    # A long array is split in the same way for every operation. So test long arrays with all operations in float32 only.
    cases = [case for case in cases if case[1] != LONG or case[2] == "sum" or case[0] == "float32"]
    cases = [case for case in cases if not (case[0].startswith("complex") and case[2] in ("min", "max"))]
    order = list(range(len(cases)))
    random.Random(engine.rank).shuffle(order)
    handles = {}
    for i in order:
        dtype, shape, op = cases[i]
        handles[i] = engine.allreduce(f"r{i}", value(engine.rank, i, shape, dtype), op=op)
    for i, (dtype, shape, op) in enumerate(cases):
        got, wanted = handles[i].wait(60), wanted_of(engine.size, i, shape, dtype, op)
        # numpy.testing takes several times as long as array_equal, but its error names the difference.
        if not numpy.array_equal(got, wanted):
            numpy.testing.assert_array_equal(got, wanted, str(cases[i]))
            raise AssertionError(f"{cases[i]}: {numpy.shape(got)} in place of {wanted.shape}")


def short_integers_wrap(engine: collectives.Engine) -> None:
    """Regression: for arrays of a few elements or more, sums by Open MPI's AVX code stopped at the largest integer,
    instead of wrapping around."""
    for dtype in ("int8", "uint8", "int16", "uint16"):
        large = numpy.full(100 * engine.size, numpy.iinfo(dtype).max - 3, dtype)
        wanted = numpy.multiply(large, engine.size, dtype=dtype, casting="unsafe")
        for name, out in (
            ("all", engine.allreduce(f"w{dtype}", large)),
            ("part", engine.reducescatter(f"v{dtype}", large)),
        ):
            got = out.wait(120)
            numpy.testing.assert_array_equal(got, wanted[: len(got)], f"{dtype} {name}")


def movements(engine: collectives.Engine) -> None:
    rank, size = engine.rank, engine.size
    gathered = engine.allgather("g", numpy.full((rank, 2), rank)).wait(120)
    assert gathered.tolist() == [[k, k] for k in range(size) for _ in range(k)]
    assert engine.broadcast("b", numpy.arange(3) + rank, root=size - 1).wait(120)[0] == size - 1
    rows, received = engine.alltoall("a", numpy.arange(size) * 10 + rank).wait(120)
    assert rows.tolist() == [rank * 10 + k for k in range(size)]
    assert received == (1,) * size
    assert engine.reducescatter("s", numpy.ones((size + 1, 2), numpy.float16)).wait(120).shape == (1 + (rank == 0), 2)


def mismatches_raise_everywhere_and_the_engine_goes_on(engine: collectives.Engine) -> None:
    try:
        engine.allreduce("m", numpy.ones(3 + engine.rank)).wait(120)
    except collectives.MismatchError as error:
        told = str(error)
    else:
        told = "'m'" if engine.size == 1 else "nothing was raised"
    assert "'m'" in told
    assert engine.allreduce("m", numpy.ones(3)).wait(120)[0] == engine.size


def process_sets(engine: collectives.Engine) -> None:
    if engine.size > 2:
        number = engine.add_process_set([1, 0])
        if engine.rank < 2:
            assert engine.allreduce("p", numpy.ones(2), process_set=number).wait(120)[0] == 2
        assert engine.remove_process_set(number)


def joining(engine: collectives.Engine) -> None:
    for _ in range(engine.rank):
        assert engine.allreduce("j", numpy.ones(3), op="average").wait(120)[0] <= 1
    last = engine.join().wait(120)
    assert (engine.allgather("l", numpy.array([last])).wait(120) == last).all()


if __name__ == "__main__":
    started = collectives.start()
    for check in (
        reductions,
        short_integers_wrap,
        movements,
        mismatches_raise_everywhere_and_the_engine_goes_on,
        process_sets,
        joining,
    ):
        # In the first round, the ranks negotiate each operation. In the second round, they take the result of this
        # negotiation from the cache.
        for _ in range(2):
            check(started)
    # Ten restarts suffice here, because test_endurance.py restarts the engine a hundred times.
    for _ in range(10):
        collectives.stop()
        started = collectives.start()
        assert started.allreduce("q", numpy.ones(1)).wait(120)[0] == started.size
    print("ok", started.rank, flush=True)
