"""The message on a worker that ran out of memory."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.observe.load_watch import Sample
from paceline.supervisor.diagnosis.memory import memory_text

GIB = 1 << 30
NODES = {0: 0, 1: 0, 2: 1}
PLAN = {"parameters": 4 * GIB, "gradients": 4 * GIB, "optimizer": 8 * GIB, "activations": None, "free": 30 * GIB}


def samples(of_0: list[float], of_1: float = 3.0, *, used: float = 60.0, **more: Any) -> list[Sample]:
    """One in five seconds, the last at 1000 s; of two ranks on a node with 64 GiB."""
    return [
        Sample(
            at_s=1000.0 - 5 * (len(of_0) - 1 - number),
            nodes={0: {"memory_gib": used, "memory_total_gib": 64.0}, 1: {"memory_gib": 1.0, "memory_total_gib": 64.0}},
            ranks={
                0: {"memory_gib": held, "processes": 5.0, "steps": 9.0, **more},
                1: {"memory_gib": of_1},
                2: {"memory_gib": 50.0},
            },
        )
        for number, held in enumerate(of_0)
    ]


@pytest.mark.promise("worker-ran-out-memory-told")
def test_memory_report_has_the_growth_of_the_rank_and_the_memory_planned_by_parallelize():
    held = [2.0, 14.0, 16.0, *(20.0 + 3 * number for number in range(12))]
    assert memory_text(0, samples(held), NODES, PLAN, now_s=1003.0) == (
        "Rank 0 held 53.0 GiB, with the 4 processes below it, when it was last seen, 3 s ago; "
        "it had grown from 26.0 GiB in 45 s. "
        "On its node the 2 workers held 56.0 GiB together, and 60.0 GiB of 64.0 GiB were in use. "
        "By parallelize's plan: parameters 4.0 GiB, gradients 4.0 GiB, optimizer 8.0 GiB; the rest is activations, data and what "
        "libraries keep. "
        "What grows from step to step is kept somewhere: losses with their graph (log loss.item()), a list, a cache."
    )


def test_out_of_memory_report_names_another_rank_that_used_most_memory():
    text = memory_text(0, samples([5.0] * 8, of_1=48.0), NODES, None, now_s=1001.0)
    assert "Rank 1 held most of it, 48.0 GiB." in text
    assert "grown" not in text
    # Rank 2 is on another node.
    assert "Rank 2" not in text


def test_memory_of_other_processes_is_reported():
    text = memory_text(0, samples([5.0] * 8), NODES, None, now_s=1001.0)
    assert "52.0 GiB of that were not this run's." in text


def test_memory_rise_at_the_start_is_not_reported_as_growth():
    held = [1.0, 5.0, 10.0, 14.0, *[15.0] * 12]
    assert "grown" not in memory_text(0, samples(held), NODES, None, now_s=1001.0)


def test_memory_text_has_gpu_memory_in_gib_and_sizes_below_one_gib_in_mib():
    text = memory_text(0, samples([0.25] * 8, gpu_memory_gib=79.0), NODES, {"parameters": GIB // 2}, now_s=1000.0)
    assert text.startswith(
        "Rank 0 held 256 MiB, with the 4 processes below it, and 79.0 GiB of GPUs, when it was last seen, 0 s"
    )
    assert text.endswith(
        "By parallelize's plan: parameters 512 MiB; the rest is activations, data and what libraries keep."
    )


def test_memory_report_has_the_peak_from_the_process_counter_if_it_exceeds_the_samples():
    text = memory_text(0, samples([5.0] * 8), NODES, None, now_s=1002.0, peak_bytes=48 * GIB)
    assert text.startswith(
        "Rank 0 held 5.0 GiB, with the 4 processes below it, when it was last seen, 2 s ago, and 48.0 GiB at its most. "
    )
    assert "at its most" not in memory_text(0, samples([5.0] * 8), NODES, None, now_s=1002.0, peak_bytes=5 * GIB)
    assert memory_text(0, [], NODES, None, peak_bytes=300 << 20) == "Rank 0 held 300 MiB at its most."


def test_missing_samples_give_no_memory_text():
    assert memory_text(0, [], NODES, None) == ""
    assert memory_text(0, [], NODES, {"odd": 1}) == ""


def test_rank_missing_in_the_last_memory_sample_is_not_said_to_hold_less_than_another_rank():
    *seen, last = samples([5.0] * 8)
    gone = Sample(at_s=last.at_s, nodes=last.nodes, ranks={1: {"memory_gib": 3.0}})
    assert "held most of it" not in memory_text(0, [*seen, gone], NODES, None, now_s=1001.0)


def test_memory_growth_before_the_first_step_is_not_called_growth_per_step():
    text = memory_text(0, samples([2.0 + number for number in range(15)], steps=0.0), NODES, None, now_s=1001.0)
    assert "it had grown from" in text
    assert "from step to step" not in text


def test_out_of_memory_on_a_node_with_free_memory_suggests_a_ulimit_of_the_process():
    text = memory_text(0, samples([5.0] * 8, used=20.0), NODES, None, now_s=1001.0, by_kernel=False)
    assert "So there was room: a limit of its own (ulimit), or one very large request" in text
