"""Any operations of the engine, in any order, on 1 to 4 ranks, have NumPy's results.

Hypothesis draws plans; one world of processes for each number of ranks carries them out (property_ranks.py), and each
rank compares with NumPy (property_values.py). A plan that fails is made smaller, as Hypothesis does.

PACELINE_PLANS=5000 draws so many for each number of ranks, other ones each time.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.ranks import MPI
from tests.torch_mpi.test_world import MPIRUN, ROOT, need_mpi

PLANS = int(os.environ.get("PACELINE_PLANS", "0"))
LIMIT_S = 100

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
COMPLEX = ("complex64", "complex128")
ALL = (*FLOATS, *INTEGERS, "bool", *COMPLEX)
#: The last two arrays are too long to be copied into a buffer, and are reduced in several pieces.
SHAPES = ((1,), (), (0,), (7,), (3, 5), (2, 0, 3), (5, 2, 3), (9000,), (70000,), (300000,), (1100000,))
ROWS = ((3,), (1,), (0,), (7, 2), (4, 0), (5, 2, 3), (2, 30000))
KINDS = ("allreduce", "allreduce", "allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier")


@st.composite
def members(draw: st.DrawFn, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> dict[str, Any]:
    return {
        "dtype": draw(st.sampled_from(dtypes)),
        "shape": draw(st.sampled_from(shapes)),
        "layout": draw(st.sampled_from(("plain", "gaps", "transposed", "reversed"))),
        "values": draw(st.sampled_from(("whole", "any"))),
    }


@st.composite
def operations(draw: st.DrawFn, number: int, size: int) -> dict[str, Any]:
    kind = draw(st.sampled_from(KINDS))
    everyone = tuple(range(size))
    sets = [everyone, everyone[: size // 2 + 1], everyone[-1:], everyone[::2]]
    ranks = list(draw(st.sampled_from(list(dict.fromkeys(sets)))))
    operation: dict[str, Any] = {
        "kind": kind, "name": f"o{number}", "ranks": ranks, "members": [], "grouped": False, "op": "", "prescale": 1.0,
        "postscale": 1.0, "root": -1, "splits": None, "out": draw(st.sampled_from(("none", "same", "other"))), "wrong": None,
    }  # fmt: skip
    if kind in ("allreduce", "reducescatter"):
        _draw_reduction(draw, operation)
    elif kind == "broadcast":
        operation["root"] = draw(st.sampled_from(ranks))
        operation["members"] = [draw(members(ALL, SHAPES))]
    elif kind == "allgather":
        operation["grouped"] = draw(st.booleans())
        for _ in range(draw(st.integers(1, 3)) if operation["grouped"] else 1):
            operation["members"].append(draw(members(ALL, ROWS)) | {"rows": [draw(st.integers(0, 4)) for _ in ranks]})
    elif kind == "alltoall":
        member = draw(members(ALL, ROWS))
        if draw(st.booleans()):
            member["rows"] = [len(ranks) * draw(st.integers(0, 3)) for _ in ranks]
        else:
            splits = [[draw(st.integers(0, 3)) for _ in ranks] for _ in ranks]
            # Rows beyond the sum of the splits are not sent.
            member["rows"] = [sum(row) + draw(st.integers(0, 1)) for row in splits]
            operation["splits"] = splits
        operation["members"] = [member]
    return operation


def _draw_reduction(draw: st.DrawFn, operation: dict[str, Any]) -> None:
    size = len(operation["ranks"])
    scattered = operation["kind"] == "reducescatter"
    ops = ["sum", "average", "min", "max", "product"]
    if not scattered and not size & (size - 1):
        ops.append("adasum")
    op = operation["op"] = draw(st.sampled_from(ops))
    dtypes = ALL if op in ("sum", "average", "product") else FLOATS if op == "adasum" else ALL[: -len(COMPLEX)]
    operation["grouped"] = draw(st.booleans())
    shapes = ROWS if scattered else SHAPES
    count = draw(st.integers(1, 3)) if operation["grouped"] else 1
    operation["members"] = [draw(members(dtypes, shapes)) for _ in range(count)]
    if not any(member["dtype"] == "bool" for member in operation["members"]):
        operation["prescale"] = draw(st.sampled_from((1.0, 0.5, 0.6)))
        operation["postscale"] = draw(st.sampled_from((1.0, 0.25, 0.6)))
    if operation["prescale"] != 1.0 or operation["postscale"] != 1.0:
        for member in operation["members"]:
            # The scaling of integers uses float64, which can't represent all integers. So use whole numbers.
            member["values"] = "whole" if member["dtype"] in INTEGERS else member["values"]
    if size > 1 and draw(st.integers(0, 9)) == 9:
        what = draw(st.sampled_from(("shape", "dtype", *(["op"] if op != "adasum" else []))))
        complex_ones = any(member["dtype"] in COMPLEX for member in operation["members"])
        empty_ones = any(0 in member["shape"] for member in operation["members"])
        if not complex_ones and not (what == "shape" and empty_ones):
            operation["wrong"] = [draw(st.sampled_from(operation["ranks"])), what]


@st.composite
def plans(draw: st.DrawFn, size: int) -> dict[str, Any]:
    mode = draw(st.sampled_from(("shuffled", "in_order", "at_once", "threads")))
    drawn = [draw(operations(number, size)) for number in range(draw(st.integers(1, 6)))]
    if mode in ("shuffled", "threads"):
        # Barriers have no name but a count, so different threads can't call them in a fixed order.
        drawn = [operation for operation in drawn if operation["kind"] != "barrier"]
    return {
        "settings": draw(
            st.sampled_from(({}, {}, {}, {"fusion_bytes": 0}, {"fusion_bytes": 4096}, {"cache_capacity": 2}))
        ),
        "turns": draw(st.integers(1, 3)),
        "mode": mode,
        "late": draw(st.integers(-1, size - 1)),
        "joins": draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
        if draw(st.integers(0, 4)) == 4
        else [],
        "operations": drawn,
    }


class World:
    """So many processes that carry out plans."""

    def __init__(self, size: int, folder: Path) -> None:
        self._size = size
        self._folder = folder
        self._streams: dict[int, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None

    def carry_out(self, plan: dict[str, Any]) -> None:
        """Fail as any of the ranks does. A world in which a rank has failed is not used again."""
        if self._process is None:
            self._start()
        answers: dict[int, str] = {}
        try:
            for stream in self._streams.values():
                stream.write(json.dumps(plan) + "\n")
                stream.flush()
            for rank, stream in self._streams.items():
                answers[rank] = json.loads(stream.readline())
        except (OSError, ValueError) as error:
            answers[-1] = f"no answer: {error!r}; see {self._folder / 'output'}"
        failed = "\n".join(f"rank {rank}: {text}" for rank, text in answers.items() if text)
        if failed:
            self.close()
            output = (self._folder / "output").read_text()[-8000:]
            pytest.fail(f"{json.dumps(plan)}\n{failed}\n{output}")

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for stream in self._streams.values():
            stream.close()
        for connection in self._connections:
            connection.close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _start(self) -> None:
        path = self._folder / "s"
        path.unlink(missing_ok=True)
        environment = {
            **os.environ,
            **MPI,
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": f"{ROOT / 'src'}",
        }
        command = [sys.executable, str(Path(__file__).with_name("property_ranks.py")), str(path)]
        if self._size > 1:
            options = ["--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none", "-n", str(self._size)]
            command = [str(MPIRUN), *options, *command]
        with socket.socket(socket.AF_UNIX) as server, (self._folder / "output").open("wb") as output:
            server.bind(str(path))
            server.listen()
            server.settimeout(LIMIT_S)
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            self._streams, self._connections = {}, []
            for _ in range(self._size):
                connection, _ = server.accept()
                connection.settimeout(LIMIT_S)
                self._connections.append(connection)
                stream = connection.makefile("rw", encoding="utf-8")
                self._streams[int(stream.readline())] = stream


@pytest.fixture(params=[1, 2, 3, 4])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[int, World]]:
    need_mpi()
    made = World(request.param, tmp_path)
    yield request.param, made
    made.close()


@pytest.mark.promise("operations-order-give-numpy-gives")
@pytest.mark.timeout(900)
def test_random_operation_sequences_equal_numpy(world: tuple[int, World]) -> None:
    size, processes = world

    @settings(
        max_examples=PLANS or 30,
        derandomize=not PLANS,
        database=None,
        deadline=None,
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(plans(size))
    def check(plan: dict[str, Any]) -> None:
        processes.carry_out(plan)

    check()
