"""The schedules, as drawings, and the formulas that hold for them."""

from __future__ import annotations

from itertools import product

import pytest

from paceline.parallel.pipeline.timeline import (
    Receive,
    Send,
    StageCall,
    bubble,
    draw_text,
    in_flight,
    order,
    program,
    simulate,
)

WORKERS = (2, 4)


def drawn(schedule: str, workers: int, microbatches: int, chunks: int = 1) -> list[str]:
    events = simulate(schedule, workers, microbatches, chunks, backward=lambda stage: 2.0)
    return [line.partition("  ")[2] for line in draw_text(events, workers).splitlines()]


def test_gpipe_runs_all_forwards_before_all_backwards() -> None:
    assert drawn("gpipe", 3, 3) == [
        "F0 F1 F2 .. .. .. .. .. .. B0 B0 B1 B1 B2 B2",
        ".. F0 F1 F2 .. .. .. B0 B0 B1 B1 B2 B2 .. ..",
        ".. .. F0 F1 F2 B0 B0 B1 B1 B2 B2 .. .. .. ..",
    ]


def test_1f1b_runs_backward_as_early_as_possible() -> None:
    assert drawn("1f1b", 2, 3) == [
        "F0 F1 .. .. B0 B0 F2 B1 B1 .. B2 B2",
        ".. F0 B0 B0 F1 B1 B1 F2 B2 B2 .. ..",
    ]


def test_each_worker_runs_two_stages_per_microbatch_in_the_interleaved_schedule() -> None:
    assert drawn("interleaved", 2, 2, 2) == [
        "0:F0 0:F1 2:F0 2:F1 ..   ..   2:B0 2:B0 ..   2:B1 2:B1 0:B0 0:B0 0:B1 0:B1",
        "..   1:F0 1:F1 3:F0 3:B0 3:B0 3:F1 3:B1 3:B1 1:B0 1:B0 1:B1 1:B1 ..   ..",
    ]


@pytest.mark.parametrize(("schedule", "workers"), list(product(("gpipe", "1f1b"), WORKERS)))
def test_simulated_step_time_equals_the_bubble_formula(schedule: str, workers: int) -> None:
    for microbatches in range(workers, 17):
        events = simulate(schedule, workers, microbatches, backward=lambda stage: 2.0)
        busy = 3 * microbatches
        assert max(event.end for event in events) == pytest.approx(busy / (1 - bubble(schedule, workers, microbatches)))


@pytest.mark.parametrize("workers", WORKERS)
def test_interleaving_divides_the_bubble_by_the_number_of_chunks(workers: int) -> None:
    for chunks, microbatches in product((2, 3), range(workers, 17, workers)):
        events = simulate("interleaved", workers, microbatches, chunks, backward=lambda stage: 2.0)
        idle = bubble("interleaved", workers, microbatches, chunks)
        assert max(event.end for event in events) == pytest.approx(3 * chunks * microbatches / (1 - idle))
        assert idle < bubble("1f1b", workers, microbatches)


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_every_microbatch_goes_through_every_stage_once(schedule: str, chunks: int) -> None:
    for workers, microbatches in product(WORKERS, (4, 8)):
        calls = [call for worker in range(workers) for call in order(schedule, worker, workers, microbatches, chunks)]
        expected = product("FB", range(workers * chunks), range(microbatches))
        assert sorted(calls) == sorted(StageCall(*call) for call in expected)


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("gpipe", 2), ("forward", 1), ("forward", 3)],
)
def test_schedules_do_not_deadlock_with_blocking_messages(schedule: str, chunks: int) -> None:
    for workers, microbatches in product((2, 3, 4, 8), (1, 2, 4, 7, 8, 12)):
        if schedule not in ("gpipe", "forward") and microbatches % workers:
            continue
        todo = [list(program(schedule, worker, workers, microbatches, chunks)) for worker in range(workers)]
        assert [[step for step in own if isinstance(step, StageCall)] for own in todo] == [
            list(order(schedule, worker, workers, microbatches, chunks)) for worker in range(workers)
        ]
        last = workers * chunks - 1
        # The results that each worker has received or computed.
        there: list[set[StageCall]] = [set() for _ in range(workers)]
        while any(todo):
            heads = [own[0] if own else None for own in todo]
            moved = False
            for worker, head in enumerate(heads):
                if isinstance(head, Send):
                    if heads[head.receiver] == Receive(head.call, worker):
                        there[head.receiver].add(head.call)
                        del todo[worker][0], todo[head.receiver][0]
                        moved = True
                elif isinstance(head, StageCall):
                    step = -1 if head.kind == "F" else 1
                    end = 0 if head.kind == "F" else last
                    assert head.stage == end or head._replace(stage=head.stage + step) in there[worker], head
                    del todo[worker][0]
                    moved = True
            assert moved, f"{schedule}, {workers} workers, {microbatches} microbatches: {heads} wait for one another"


def test_gpipe_worker_with_two_stages_runs_backwards_in_microbatch_order() -> None:
    assert [f"{call.kind}{call.stage}:{call.micro}" for call in order("gpipe", 1, 2, 2, 2)] == [
        *("F1:0", "F1:1", "F3:0", "F3:1"),
        *("B3:0", "B3:1", "B1:0", "B1:1"),
    ]


def test_interleaved_forward_schedule_of_three_microbatches_has_the_expected_order() -> None:
    assert drawn("forward", 2, 3, 2) == [
        "0:F0 0:F1 2:F0 2:F1 0:F2 ..   2:F2 ..",
        "..   1:F0 1:F1 3:F0 3:F1 1:F2 ..   3:F2",
    ]


def test_1f1b_holds_one_microbatch_per_remaining_stage() -> None:
    assert [in_flight("1f1b", stage, 4, 4, 16) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight("gpipe", stage, 4, 4, 16) for stage in range(4)] == [16] * 4
    assert [in_flight("1f1b", stage, 4, 4, 2) for stage in range(4)] == [2, 2, 2, 1]
    assert in_flight("interleaved", 0, 4, 2, 4) == 4


def test_slowest_stage_determines_the_step_time() -> None:
    events = simulate("1f1b", 2, 4, forward=lambda stage: 1.0 + stage, backward=lambda stage: 2.0 + 2 * stage)
    # Expected: 4 microbatches in the slow stage, one forward pass before them and one backward pass after them.
    assert max(event.end for event in events) == 4 * 6 + 1 + 2
