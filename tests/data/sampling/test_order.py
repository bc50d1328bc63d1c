from __future__ import annotations

import itertools
import math
from array import array
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data import GlobalOrder
from paceline.data.sampling import order as module
from paceline.errors import DataError
from tests.helpers import run_python

LENGTHS = st.one_of(st.integers(0, 300), st.sampled_from([1023, 1024, 1025, 4096, 5000]))
SEEDS = st.integers(-(1 << 70), 1 << 70)

FROZEN_10 = [3, 8, 1, 5, 4, 9, 7, 2, 6, 0]
FROZEN_MILLION = [764886, 342541, 712143, 741427, 891331, 74496]
FROZEN_HUGE = [446993237188157, 704065521126509, 356309090317263]


@pytest.fixture
def without_numpy(monkeypatch):
    monkeypatch.setattr(module, "_numpy", lambda: None)


@given(LENGTHS, SEEDS, SEEDS)
def test_an_epoch_has_every_sample_once(length, seed, epoch):
    order = GlobalOrder(length, seed, epoch)
    assert sorted(order) == list(range(length))
    assert len(order) == length


def test_global_order_equals_the_order_of_earlier_releases():
    """Checkpoints hold positions in this order: a change of these numbers makes every run resume with other samples."""
    assert GlobalOrder(10)[:].tolist() == FROZEN_10
    assert GlobalOrder(1_000_000, seed=7, epoch=3)[:6].tolist() == FROZEN_MILLION
    assert [GlobalOrder(10**15, seed=-1, epoch=2)[position] for position in (0, 1, 10**15 - 1)] == FROZEN_HUGE


def test_global_order_without_numpy_equals_the_order_of_earlier_releases(without_numpy):
    assert GlobalOrder(10)[:].tolist() == FROZEN_10
    assert GlobalOrder(1_000_000, seed=7, epoch=3)[:6].tolist() == FROZEN_MILLION


@pytest.mark.parametrize("length", [1, 2, 255, 256, 257, 1000, 4097, 70_000, (1 << 26) + 1, 10**12, 1 << 62])
def test_global_order_is_the_same_with_numpy_without_numpy_and_by_single_index(length, monkeypatch):
    order = GlobalOrder(length, seed=1, epoch=2)
    positions = range(0, length, max(1, length // 500))[:500]
    fast = order.samples(positions)
    monkeypatch.setattr(module, "_numpy", lambda: None)
    assert order.samples(positions) == fast
    assert [order[position] for position in positions] == fast.tolist()


def test_sample_order_module_does_not_import_numpy():
    loaded = run_python("import sys, paceline.data.sampling.order; print('numpy' in sys.modules)")
    assert loaded.strip() == "False"


def test_global_sample_order_is_computed_without_numpy():
    ask = "from paceline.data.sampling.order import GlobalOrder\nprint(*GlobalOrder(10)[:])"
    code = f"import sys; sys.modules['numpy'] = None\n{ask}"
    assert [int(word) for word in run_python(code).split()] == FROZEN_10


@given(st.integers(1, 5000), st.data())
def test_slices_of_the_global_order_equal_slices_of_its_list(length, data):
    order = GlobalOrder(length, 3, 4)
    everything = list(order)
    part = data.draw(st.slices(length))
    assert order[part] == array("q", everything[part])
    position = data.draw(st.integers(-length, length - 1))
    assert order[position] == everything[position]


def test_long_slice_of_the_global_order_shares_its_memory_with_numpy():
    order = GlobalOrder(200_000)
    part = order[1:]
    assert part.tolist() == [sample for piece in order.chunks(range(1, 200_000)) for sample in piece]
    assert len(list(order.chunks(range(200_000)))) > 1
    view = np.asarray(part)
    view[0] = -1
    assert part[0] == -1


def test_index_beyond_the_global_order_raises_but_a_range_of_samples_starts_over():
    order = GlobalOrder(10)
    with pytest.raises(IndexError):
        order[10]
    with pytest.raises(IndexError):
        GlobalOrder(0)[0]
    assert order.samples(range(8, 13)).tolist() == [*FROZEN_10[8:], *FROZEN_10[:3]]
    assert GlobalOrder(10, shuffle=False).samples(range(8, 13)).tolist() == [8, 9, 0, 1, 2]
    long = GlobalOrder(300)
    assert long.samples(range(298, 302)).tolist() == [long[298], long[299], long[0], long[1]]


def test_seed_and_epoch_each_give_another_order():
    orders = {tuple(GlobalOrder(50, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100
    # torch's sampler seeds with seed + epoch, so it would give the same order here.
    assert list(GlobalOrder(50, 1, 2)) != list(GlobalOrder(50, 2, 1))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_every_order_of_a_few_samples_is_equally_likely(length):
    count = math.factorial(length)
    seen = Counter(tuple(GlobalOrder(length, seed)) for seed in range(25 * count))
    _is_uniform([seen[order] for order in itertools.permutations(range(length))])


def test_all_720_orders_of_6_samples_occur():
    assert len({tuple(GlobalOrder(6, seed)) for seed in range(9000)}) == 720


@pytest.mark.parametrize("length", [17, 256, 257, 1000])
def test_sample_occurs_at_every_position_equally_often(length):
    orders = np.stack([np.asarray(GlobalOrder(length, seed)[:]) for seed in range(1000)])
    for position in (0, 1, length // 2, length - 1):
        _is_uniform(np.bincount(orders[:, position], minlength=length))


def test_adjacent_samples_of_the_shuffled_order_are_uncorrelated_in_their_dataset_index():
    order = np.asarray(GlobalOrder(100_000, 5, 6)[:])
    steps = (order[1:] - order[:-1]) % 100_000
    _is_uniform(np.bincount(steps * 64 // 100_000, minlength=64))
    assert abs(np.corrcoef(order[1:], order[:-1])[0, 1]) < 0.02
    # The orders of two epochs are uncorrelated position by position.
    other = np.asarray(GlobalOrder(100_000, 5, 7)[:])
    assert abs(np.corrcoef(order, other)[0, 1]) < 0.02
    assert (order == other).sum() < 15


def test_uniformity_check_detects_a_skewed_count():
    with pytest.raises(AssertionError):
        _is_uniform([1100, 1000, 1000, 900])


def _is_uniform(counts):
    """Chi-square within 4 standard deviations of its mean; the seeds are fixed, so it holds or it does not."""
    counts = np.asarray(counts, dtype=float)
    free = len(counts) - 1
    mean = counts.sum() / len(counts)
    chi_square = ((counts - mean) ** 2 / mean).sum()
    assert chi_square <= free + 4 * math.sqrt(2 * max(free, 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1,), "length=-1: a number of samples is 0 or more"),
        (((1 << 62) + 1,), "at most"),
        ((1.5,), r"length=1\.5 must be an integer"),
        ((10, "1"), "seed='1' must be an integer"),
        ((10, 1, None), "epoch=None must be an integer"),
    ],
)
def test_invalid_length_seed_or_epoch_is_refused(arguments, message):
    with pytest.raises(DataError, match=message):
        GlobalOrder(*arguments)


def test_global_order_accepts_numpy_integers_as_length_seed_and_epoch():
    assert list(GlobalOrder(np.int64(10), np.int32(0), np.uint8(0))) == FROZEN_10
