"""The program that test_robust.py runs on several ranks: `python robust_checks.py <name>`; each rank prints "ok" or its error."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest

from paceline import collectives
from paceline.collectives import EngineSettings


def different_process_sets_are_told_to_all() -> None:
    engine = collectives.start()
    # In both cases the last rank asks for another process set than rank 0. The set [0, 99] is also invalid.
    for ranks in ([0, engine.size - 1], [0, 99]):
        with pytest.raises(collectives.MismatchError, match=r"PROCESS_SET ranks .* rank 0 sent \[0\]"):
            engine.add_process_set(ranks if engine.rank == engine.size - 1 else [0])
    # Rank 0 removes a process set while the other ranks add one.
    number = engine.add_process_set([0, 1])
    with pytest.raises(collectives.MismatchError, match="operations"):
        engine.add_process_set([1]) if engine.rank else engine.remove_process_set(number)
    # After the errors, the engine continues and its process sets are unchanged.
    assert sorted(engine.process_sets()) == [0, number]
    assert not engine.remove_process_set(77)
    with pytest.raises(collectives.ArgumentError, match="name each rank once"):
        engine.add_process_set([engine.size])
    if engine.rank < 2:
        assert engine.allreduce("a", numpy.ones(1), process_set=number).wait(120)[0] == 2
    assert engine.allreduce("a", numpy.ones(1)).wait(120)[0] == engine.size


def sets_that_come_and_go_leave_nothing_behind() -> None:
    engine = collectives.start()

    def once() -> None:
        number = engine.add_process_set([0, 1])
        if engine.rank < 2:
            assert engine.allreduce("a", numpy.ones(1), process_set=number).wait(120)[0] == 2
        assert engine.remove_process_set(number)

    for _ in range(5):
        once()
    before = held()
    for _ in range(40):
        once()
    until(lambda: grown(before) <= 3, lambda: (before, held()))


def starts_and_stops_leave_nothing_behind() -> None:
    def once() -> None:
        engine = collectives.start()
        assert engine.allreduce("a", numpy.ones(1)).wait(120)[0] == engine.size
        collectives.stop()

    for _ in range(5):
        once()
    before = held()
    # Forty starts suffice here, because test_endurance.py starts and stops the engine a hundred times.
    for _ in range(40):
        once()
    until(lambda: grown(before) <= 3, lambda: (before, held()))


def a_rank_killed_in_the_middle_is_told_to_the_others() -> None:
    engine = collectives.start()
    last = engine.size - 1
    array = numpy.ones(1 << 22, numpy.float32)
    engine.allreduce("first", array).wait()
    try:
        for step in range(100000):
            if engine.rank == last and step == 20:
                handle = engine.allreduce(f"step{step}", array)
                time.sleep(0.002)
                os.kill(os.getpid(), signal.SIGKILL)
                handle.wait()
            engine.allreduce(f"step{step}", array).wait(60)
    except collectives.ShutDownError as error:
        print("told:", error, flush=True)
        collectives.stop()
        try:
            collectives.start()
        except collectives.CollectivesError as refused:
            print("refused:", refused, flush=True)


def survivors_meet_again(port: str) -> None:
    engine = collectives.start()
    array = numpy.ones(1 << 20, numpy.float32)
    engine.allreduce("first", array).wait(120)
    # Rank 0 may be killed only after all ranks have finished the sum.
    Path(f"has_summed_{engine.rank}").touch()
    if engine.rank == 0:
        while len(list(Path.cwd().glob("has_summed_*"))) < engine.size:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(collectives.ShutDownError):
        engine.allreduce("second", array).wait(60)
    collectives.stop()
    os.environ.update(RANK=str(engine.rank - 1), WORLD_SIZE="2", MASTER_PORT=port)
    print("together again:", collectives.start().allreduce("third", numpy.ones(1)).wait(60)[0], flush=True)


def an_engine_that_fails_alone_is_told_to_the_others() -> None:
    engine = collectives.start()
    engine.allreduce("first", numpy.ones(1)).wait(120)
    if engine.rank == 1:
        # This makes the engine's thread fail, as a lack of memory could.
        engine._sets.loops[0].negotiation.performer.perform = None
    try:
        # The arrays are too long to be sent together with the negotiation.
        engine.allreduce("second", numpy.ones(1 << 16)).wait(120)
        engine.allreduce("third", numpy.ones(1 << 16)).wait(120)
    except collectives.ShutDownError as error:
        print("told:", error, flush=True)
    collectives.stop()


def a_stall_is_told_and_over(file: str) -> None:
    engine = collectives.start(EngineSettings(stall_warning_s=0.2))
    told, is_read = Path(file), Path(f"{file}.read")
    if engine.rank == 1:
        until(lambda: told.exists() and "late" in told.read_text(), lambda: "no stall is told")
    engine.allreduce("late", numpy.ones(1)).wait(120)
    if engine.rank == 1:
        # Rank 1 waits here, because its next operation would otherwise be reported as a stall too.
        until(is_read.exists, lambda: "the other rank has not read the file")
    else:
        until(lambda: "true" in told.read_text(), told.read_text)
        lines = [json.loads(line) for line in told.read_text().splitlines()]
        is_read.touch()
        assert [line["resolved"] for line in lines] == [False, True], lines
        assert {line["name"] for line in lines} == {"late"}
        assert [lines[0][key] for key in ("operation", "process_set", "missing_ranks")] == ["allreduce", 0, [1]]
        assert 0 in lines[0]["submitted_ranks"]
        assert 0.2 <= lines[0]["waited_s"] < lines[1]["waited_s"]


def a_stall_is_ended_at_the_limit() -> None:
    engine = collectives.start(EngineSettings(stall_warning_s=0.2, stall_shutdown_s=6))
    engine.barrier().wait(120)
    if engine.rank == 1:
        # Rank 1 starts its operation later, so that the operation of rank 0 is the first to reach the limit.
        time.sleep(0.4)
    handle = engine.allreduce("other" if engine.rank == 1 else "one", numpy.ones(1))
    try:
        handle.wait(120)
    except collectives.ShutDownError as error:
        print("told:", error, flush=True)


def until(condition: Callable[[], object], told: Callable[[], object]) -> None:
    end_s = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < end_s, told()
        time.sleep(0.01)


def held() -> dict[str, int]:
    """What a process can hold too much of."""
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
    }


def grown(before: dict[str, int]) -> int:
    return max(now - before[what] for what, now in held().items())


if __name__ == "__main__":
    for name in sys.argv[1].split(","):
        globals()[name](*sys.argv[2:])
        collectives.stop()
    print("ok", flush=True)
