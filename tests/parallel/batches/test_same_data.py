"""Two samples show whether ranks have one dataset; samples that are drawn anew each time show nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.late import late

np, torch, data = late("numpy"), late("torch"), late("torch.utils.data")


@pytest.fixture(scope="module", autouse=True)
def with_torch() -> None:
    """Import the modules that load torch before the first test: collecting the tests loads none."""
    global are_alike, read_twice, summarise, tags
    from paceline.parallel.batches.microbatches import tags
    from paceline.parallel.batches.same_data import are_alike, read_twice, summarise


class Drawn:
    """Its index, many times, what `draw` gives, and what is no number."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((300,), float(index)), "drawn": self.draw(), "path": "mine"}


def from_torch() -> float:
    return float(torch.rand(()))


def from_numpy() -> float:
    return float(np.random.rand())


@pytest.mark.parametrize("draw", [from_torch, random.random, from_numpy])
def test_comparing_randomly_augmented_samples_does_not_advance_global_generators(draw: Callable[[], float]) -> None:
    random.seed(3), torch.manual_seed(3), np.random.seed(3)
    first = draw()
    random.seed(3), torch.manual_seed(3), np.random.seed(3)
    found = read_twice(data.DataLoader(Drawn(draw), batch_size=2))
    assert sorted(found) == [0, 4]
    for index, summary in found.items():
        assert summary is not None
        assert summary[0] == ([1, 300], False, [float(index)] * 64)
    assert draw() == first


def test_samples_that_differ_by_a_separate_numpy_generator_are_not_reported_as_different_data() -> None:
    own = np.random.default_rng()
    assert read_twice(data.DataLoader(Drawn(own.random), batch_size=2)) == {0: None, 4: None}


def test_samples_of_a_loader_with_num_workers_are_read_in_a_worker_process() -> None:
    class Here(Drawn):
        def __getitem__(self, index: int) -> Any:
            assert torch.utils.data.get_worker_info() is not None
            return super().__getitem__(index)

    found = read_twice(data.DataLoader(Here(from_torch), batch_size=2, num_workers=2, multiprocessing_context="fork"))
    assert found == read_twice(data.DataLoader(Drawn(from_torch), batch_size=2))


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (lambda x: x.clone(), True),
        # Two image decoders differ by about this much for the same image.
        (lambda x: x + 0.01 * x.abs().max(), True),
        (lambda x: x.flip(0), False),
        (lambda x: x.long(), False),
        (lambda x: x[:-1], False),
    ],
)
def test_samples_that_differ_only_by_rounding_count_as_equal(other: Callable[[Any], Any], same: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(40)
    assert are_alike(summarise((x, torch.tensor(3))), summarise((other(x), torch.tensor(3)))) is same


def test_complex_tensors_that_differ_only_in_their_real_part_are_not_equal() -> None:
    x = torch.arange(64.0)
    other = torch.where(x > 40, -x, x)
    assert not are_alike(summarise(x + 0j), summarise(other + 0j))


def test_integer_samples_have_to_be_exactly_equal() -> None:
    x = torch.arange(1000)
    assert not are_alike(summarise(x), summarise(torch.where(x == 900, 901, x)))


def test_ranks_at_different_steps_or_with_different_programs_have_different_tags() -> None:
    found = {tags((0, 8, step, program)) for step in range(10) for program in range(100)}
    assert len(found) > 990
    assert all(0 <= tag < 2**20 and square == tag * tag for tag, square in found)
