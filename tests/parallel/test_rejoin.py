"""The agreement of the ranks after a loss, and the journal for new ranks (`paceline.parallel.rejoin`, `exchange`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from paceline.parallel.rejoin import Position


@pytest.fixture(scope="module", autouse=True)
def with_torch() -> None:
    """Import the modules that load torch before the first test: collecting the tests loads none."""
    global Continuation, Journal, ParallelError, RegroupError, agree
    from paceline.parallel.errors import ParallelError
    from paceline.parallel.exchange import Journal
    from paceline.parallel.regroup import RegroupError
    from paceline.parallel.rejoin import Continuation, agree


def at(steps: int, call: str = "step()", **values: Any) -> Position:
    return {
        "is_new": False,
        "steps": steps,
        "call": call,
        "is_unchanged": True,
        "changes_late": False,
        "schedulers": 1,
        "averages": 0,
        **values,  # type: ignore[typeddict-item]
    }


def new(**values: Any) -> Position:
    return at(0, "load()", is_new=True, **values)


def test_all_ranks_in_the_same_step_repeat_it_with_the_state_of_the_first_staying_rank() -> None:
    assert agree([new(), at(4), at(4)]) == Continuation(root=1, behind=frozenset(), saves=False)


def test_rank_whose_step_another_rank_has_finished_takes_the_result() -> None:
    assert agree([at(4), new(), at(5)]) == Continuation(root=2, behind=frozenset({0}), saves=False)
    assert agree([at(4), at(5, "save()"), new()]) == Continuation(root=1, behind=frozenset({0}), saves=True)


def test_rank_that_has_finished_a_save_repeats_it_with_the_others() -> None:
    assert agree([at(5), at(5, "save()"), new()]) == Continuation(root=0, behind=frozenset(), saves=True)


def test_result_of_a_step_comes_from_a_rank_with_unchanged_parameters() -> None:
    positions = [at(4), at(5, is_unchanged=False), at(5), new()]
    assert agree(positions).root == 2
    assert agree([at(5, is_unchanged=False), new()]).root == 0


@pytest.mark.parametrize(
    ("positions", "reason"),
    [
        ([at(3), at(5), new()], "more than one step behind"),
        ([at(4, "save()"), at(5), new()], "more than one step behind"),
        ([at(4), at(5, is_unchanged=False), new()], "changes parameters between two steps"),
        ([at(5, "save()", changes_late=True), new()], "after save()"),
        ([at(5), new(schedulers=2)], "different numbers of schedulers"),
        ([at(5), new(averages=1)], "different numbers of averages"),
    ],
)
def test_ranks_refuse_to_continue_if_they_would_diverge(positions: list[Position], reason: str) -> None:
    with pytest.raises(RegroupError) as caught:
        agree(positions)
    assert reason in str(caught.value)


def test_journal_gives_results_in_order_and_refuses_another_set_up() -> None:
    journal = Journal()
    journal.note("gather", ["left out"])
    journal.is_kept = True
    journal.note("gather", [1, 2])
    journal.note("from_first", None)
    assert journal.read("gather") is None
    journal.is_read = True
    assert journal.read("gather") == ([1, 2],)
    assert journal.read("from_first") == (None,)
    assert len(journal.results) == 2
    with pytest.raises(ParallelError, match="in another way"):
        journal.read("gather")
    other = Journal()
    other.results, other.is_read = [("from_first", 1)], True
    with pytest.raises(ParallelError, match="in another way"):
        other.read("gather")
