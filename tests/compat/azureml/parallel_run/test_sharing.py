"""Mini-batches, shared out: nothing is started."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.compat.azureml.parallel_run.batches import Batch, ParallelRunSettings
from paceline.compat.azureml.parallel_run.sharing import Sharing

SETTINGS = ParallelRunSettings(
    entry="score.py", files=("f",), batch_size=2, timeout_s=9, tries=2, error_threshold=-1, file="rows"
)


def sharing(output=None, **changes):
    batches = [Batch(number, "f", (f"{number}a", f"{number}b")) for number in range(3)]
    return Sharing(batches, ParallelRunSettings.of_text(dataclasses.replace(SETTINGS, **changes).text()), output)


def test_mini_batch_of_a_failed_or_lost_rank_is_retried_and_rows_keep_batch_order(tmp_path):
    shared = sharing(tmp_path / "rows")
    first, second = (shared.handle({"kind": "ready"})["batch"]["number"] for _ in range(2))
    assert (first, second) == (0, 1)
    # A rank without work gets a mini-batch at which another rank failed, or with which another rank died.
    assert shared.handle({"kind": "done", "number": 1, "rows": ["1"], "items": 2})["batch"]["number"] == 2
    assert shared.handle({"kind": "failed", "number": 0, "why": "it raised"})["batch"]["number"] == 0
    shared.lost(2)
    assert shared.handle({"kind": "failed", "number": 0, "why": "it raised"})["batch"]["number"] == 2
    assert shared.handle({"kind": "done", "number": 2, "rows": ["2", "3"], "items": 1})["batch"] is None
    shared.close()
    assert (tmp_path / "rows").read_text() == "1\n2\n3\n"
    assert (shared.failed_items, shared.failed_batches, shared.failure) == (3, 1, None)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"error_threshold": 1}, "failed items: 2, more than error_threshold=1; the last was mini-batch 1: no luck"),
        ({"failed_batches": 0}, "failed mini-batches: 1, more than allowed_failed_count=0"),
        ({"failed_percent": 33.0}, "failed mini-batches: 33.33 %, more than allowed_failed_percent=33"),
        ({"error_threshold": 2, "failed_batches": 1, "failed_percent": 34.0}, None),
    ],
    ids=["items", "batches", "percent", "within"],
)
def test_parallel_run_step_ends_if_failures_exceed_its_threshold(limits, said):
    shared = sharing(tries=1, **limits)
    shared.handle({"kind": "ready"})
    following = shared.handle({"kind": "failed", "number": 0, "why": "no luck"})["batch"]
    if said is None:
        assert following is not None
        assert shared.failure is None
    else:
        assert following is None
        assert said in shared.failure


def test_parallel_run_items_without_a_result_are_reported_as_failed():
    shared = sharing(error_threshold=0)
    shared.handle({"kind": "ready"})
    assert shared.handle({"kind": "done", "number": 0, "rows": ["a"], "items": 1})["batch"] is None
    assert shared.failure == "failed items: 1, more than error_threshold=0; items of mini-batch 1 without a result: 1"


def test_parallel_run_script_that_cannot_be_loaded_fails_the_step():
    shared = sharing()
    shared.handle({"kind": "ready"})
    assert shared.handle({"kind": "give_up", "why": "score.py can't be used: no model"})["batch"] is None
    assert shared.failure == "score.py can't be used: no model"
