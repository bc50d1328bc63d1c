"""The program that test_properties.py starts on each rank: carries out plans, which come over a socket, one on each line.

    mpirun -n 3 python property_ranks.py <path of the socket>

A plan is a dictionary:

    settings    of the engine, which is restarted when they change
    turns       how often all operations are done, under the same names
    mode        shuffled: submitted in another order on each rank, waited for at the end
                in_order: waited for at the end; at_once: each one right after it, with and without the engine
                being told before; threads: that, by two threads
    late        the rank that begins a little later than the others, or -1
    joins       of each rank, how many reductions it does before it joins; empty: nobody joins
    operations  see property_values.py; wrong: [rank, what] of one that the ranks disagree about, or None
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import random
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import numpy

from paceline import collectives
from paceline.collectives.background_loop import waiting_at_once

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.collectives import property_values as values

LIMIT_S = 80


class Rank:
    """One rank at work: the engine with the settings of the last plan, and its process sets."""

    def __init__(self) -> None:
        self._settings: dict[str, Any] = {}
        self._restart({})

    def carry_out(self, plan: dict[str, Any]) -> None:
        if plan["settings"] != self._settings:
            self._restart(plan["settings"])
        for turn in range(plan["turns"]):
            if plan["late"] == self._engine.rank:
                time.sleep(0.003)
            mine = [o for o in plan["operations"] if self._engine.rank in o["ranks"]]
            if plan["mode"] == "threads":
                self._in_threads(mine, turn)
            else:
                self._in_one(mine, turn, plan["mode"])
        if plan["joins"]:
            self._join(plan["joins"])

    def _restart(self, settings: dict[str, Any]) -> None:
        collectives.stop()
        self._engine = collectives.start(collectives.EngineSettings(**settings))
        self._settings = settings
        self._sets = {self._engine.process_sets()[0]: 0}

    def _in_one(self, operations: list[dict[str, Any]], turn: int, mode: str) -> None:
        for operation in operations:
            self._set_of(operation)
        if mode == "shuffled":
            operations = list(operations)
            random.Random(f"{turn} {self._engine.rank}").shuffle(operations)
        begun = []
        for operation in operations:
            if mode == "at_once":
                with waiting_at_once if turn != 1 else contextlib.nullcontext():
                    begun.append(self._begin(operation, turn))
                self._finish(*begun.pop())
            else:
                begun.append(self._begin(operation, turn))
        for pair in begun:
            self._finish(*pair)

    def _in_threads(self, operations: list[dict[str, Any]], turn: int) -> None:
        for operation in operations:
            self._set_of(operation)
        failed: list[BaseException] = []

        def run(own: list[dict[str, Any]]) -> None:
            try:
                self._in_one(own, turn, "at_once")
            except BaseException as error:
                failed.append(error)

        # Assign each operation to one of two threads by its name, so that every rank runs the operation on the same
        # thread.
        halves = [[o for o in operations if int(o["name"][1:]) % 2 == half] for half in (0, 1)]
        threads = [threading.Thread(target=run, args=(half,)) for half in halves]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]

    def _set_of(self, operation: dict[str, Any]) -> int:
        return self._sets[tuple(operation["ranks"])]

    def make_sets(self, plan: dict[str, Any]) -> None:
        """Those that the plan needs. Every rank makes all of them, in the same order, members or not."""
        if plan["settings"] != self._settings:
            self._restart(plan["settings"])
        for operation in plan["operations"]:
            ranks = tuple(operation["ranks"])
            if ranks not in self._sets:
                self._sets[ranks] = self._engine.add_process_set(ranks)

    def _begin(self, operation: dict[str, Any], turn: int) -> tuple[Any, ...]:
        engine, kind = self._engine, operation["kind"]
        rank, members = engine.rank, operation["members"]
        how: dict[str, Any] = {"process_set": self._set_of(operation)}
        if kind == "barrier":
            return operation, turn, engine.barrier(**how), [], [], None
        arrays = [values.source(operation, index, rank, turn) for index in range(len(members))]
        dtypes = ["bfloat16" if member["dtype"] == "bfloat16" else None for member in members]
        op = operation["op"]
        if operation["wrong"] and operation["wrong"][0] == rank:
            arrays, dtypes, op = _wrong(operation["wrong"][1], arrays, dtypes, op)
        before = [array.copy() for array in arrays]
        outs: list[Any] | None = None
        if kind in ("allreduce", "broadcast") and operation["out"] != "none":
            pairs = zip(arrays, members, strict=True)
            outs = arrays if operation["out"] == "same" else [_empty_like(array, member) for array, member in pairs]
        if kind in ("allreduce", "reducescatter"):
            how |= {"op": op, "prescale": operation["prescale"], "postscale": operation["postscale"]}
            how["dtype"] = dtypes if operation["grouped"] else dtypes[0]
        if kind == "broadcast":
            how["root"] = operation["root"]
        if kind == "alltoall" and operation["splits"] is not None:
            how["splits"] = operation["splits"][operation["ranks"].index(rank)]
        if operation["grouped"]:
            if outs is not None:
                how["outs"] = outs
            handle = getattr(engine, f"grouped_{kind}")(operation["name"], arrays, **how)
        else:
            if outs is not None:
                how["out"] = outs[0]
            handle = getattr(engine, kind)(operation["name"], arrays[0], **how)
        return operation, turn, handle, arrays, before, outs

    def _finish(
        self, operation: dict[str, Any], turn: int, handle: Any, arrays: list[Any], before: list[Any], outs: Any
    ) -> None:
        kind, rank = operation["kind"], self._engine.rank
        try:
            result = handle.wait(LIMIT_S)
        except collectives.MismatchError as error:
            if not operation["wrong"] or operation["name"] not in str(error):
                raise
            return
        assert not operation["wrong"], "the ranks disagree, and nothing was raised"
        if kind == "barrier":
            return
        if kind == "alltoall":
            result, received = result
            assert list(received) == values.received(operation, rank), received
        results = result if operation["grouped"] else [result]
        for index, got in enumerate(results):
            values.check(operation, index, rank, turn, got)
        if outs is not None:
            assert all(got is out for got, out in zip(results, outs, strict=True)), "the result is not `out`"
        if outs is not arrays:
            for array, old in zip(arrays, before, strict=True):
                numpy.testing.assert_array_equal(array, old, "an input was changed")

    def _join(self, counts: list[int]) -> None:
        rank = self._engine.rank
        for step in range(counts[rank]):
            taking_part = [r for r, count in enumerate(counts) if count > step]
            array = numpy.full(5, rank + 1.0, numpy.float32)
            got = self._engine.allreduce(f"join.{step}", array, op="average").wait(LIMIT_S)
            numpy.testing.assert_allclose(got, sum(r + 1 for r in taking_part) / len(counts), rtol=1e-6)
        last = self._engine.join().wait(LIMIT_S)
        assert set(self._engine.allgather("joined", numpy.array([last])).wait(LIMIT_S)) == {last}
        assert counts[last] == max(counts) or min(counts) == max(counts)


def _wrong(what: str, arrays: list[Any], dtypes: list[Any], op: str) -> tuple[list[Any], list[Any], str]:
    if what == "shape":
        return [numpy.concatenate([a.reshape(-1), a.reshape(-1)[:1], a.reshape(-1)[:1]]) for a in arrays], dtypes, op
    if what == "dtype":
        other = numpy.float64 if arrays[0].dtype == numpy.float32 else numpy.float32
        return [numpy.zeros(a.shape, other) for a in arrays], [None] * len(arrays), op
    return arrays, dtypes, "max" if op != "max" else "min"


def _empty_like(array: Any, member: dict[str, Any]) -> Any:
    return values.laid_out(numpy.zeros(array.shape, array.dtype), member["layout"])


def main(path: str) -> None:
    faulthandler.enable()
    rank = Rank()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        stream = connection.makefile("rw", encoding="utf-8")
        stream.write(f"{os.environ.get('OMPI_COMM_WORLD_RANK', '0')}\n")
        stream.flush()
        for line in stream:
            plan = json.loads(line)
            try:
                rank.make_sets(plan)
                rank.carry_out(plan)
                answer = ""
            except BaseException:
                answer = traceback.format_exc()
                # Print where the engine's thread is, because the traceback above doesn't have that.
                faulthandler.dump_traceback()
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
    collectives.stop()


if __name__ == "__main__":
    main(sys.argv[1])
