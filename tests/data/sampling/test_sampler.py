from __future__ import annotations

import json
import os
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.data import DistributedSampler, GlobalOrder
from paceline.data.sampling.world import own_positions
from paceline.errors import DataError, RunContextError
from tests.engines.conftest import require_engine
from tests.helpers import run_python
from tests.warm import TORCH, run_alone

LENGTHS = st.integers(0, 120)
WORLDS = st.integers(1, 9)
NUMBERS = st.integers(0, 1 << 40)


def samplers(length, world_size, **options):
    """One for each rank."""
    return [DistributedSampler(length, rank, world_size, **options) for rank in range(world_size)]


def consume(samplers, steps, batch_size):
    """Return the samples of so many global steps, step by step; each rank tells its sampler how many it has used."""
    iterators = [iter(sampler) for sampler in samplers]
    seen = []
    for _ in range(steps):
        batches = [[sample for _, sample in zip(range(batch_size), iterator)] for iterator in iterators]  # noqa: B905
        for sampler, batch in zip(samplers, batches, strict=True):
            sampler.advance(len(batch))
        if any(batches):
            seen.append([sample for batch in batches for sample in batch])
    return seen


def drawing(length, world_size, **options):
    return "   ".join(
        " ".join(map(str, own_positions(length, rank, world_size, **options))) for rank in range(world_size)
    )


def test_samples_are_distributed_to_ranks_round_robin():
    assert drawing(8, 3) == "0 3 6   1 4 7   2 5"
    assert drawing(8, 3, drop_last=True) == "0 3   1 4   2 5"
    assert drawing(8, 3, pad=True) == "0 3 6   1 4 7   2 5 8"
    assert drawing(8, 3, start=5) == "5   6   7"
    assert drawing(8, 3, start=4) == "4 7   5   6"
    assert drawing(8, 3, start=4, drop_last=True) == "4   5   6"
    assert drawing(8, 3, start=8) == "      "
    assert drawing(2, 4, drop_last=True) == "         "
    assert drawing(2, 4, pad=True) == "0   1   2   3"


@pytest.mark.promise("sample-comes-exactly-once-epoch")
@given(LENGTHS, WORLDS, NUMBERS, NUMBERS, st.booleans())
def test_samplers_of_all_ranks_yield_each_sample_exactly_once_at_every_world_size(
    length, world_size, seed, epoch, shuffle
):
    made = samplers(length, world_size, seed=seed, shuffle=shuffle)
    for sampler in made:
        sampler.set_epoch(epoch)
    assert sorted(sample for sampler in made for sample in sampler) == list(range(length))
    assert [len(sampler) for sampler in made] == [len(list(sampler)) for sampler in made]


@given(LENGTHS, WORLDS, NUMBERS)
def test_drop_last_gives_ranks_equal_counts_without_repeats(length, world_size, seed):
    parts = [list(sampler) for sampler in samplers(length, world_size, seed=seed, drop_last=True)]
    assert {len(part) for part in parts} == {length // world_size}
    assert len({sample for part in parts for sample in part}) == length // world_size * world_size


@given(LENGTHS, WORLDS, NUMBERS)
def test_padding_gives_ranks_equal_counts_by_repeating_the_first_samples(length, world_size, seed):
    parts = [list(sampler) for sampler in samplers(length, world_size, seed=seed, pad=True)]
    each = -(-length // world_size)
    assert {len(part) for part in parts} == {each}
    dealt = [parts[position % world_size][position // world_size] for position in range(each * world_size)]
    order = list(GlobalOrder(length, seed))
    assert dealt[:length] == order
    assert all(sample == order[number % length] for number, sample in enumerate(dealt[length:]))


@pytest.mark.promise("order-does-depend-number-workers")
@given(LENGTHS, WORLDS, st.integers(1, 7), NUMBERS)
def test_global_batches_equal_those_of_one_worker(length, world_size, batch_size, seed):
    together = batch_size * world_size
    seen = consume(samplers(length, world_size, seed=seed), length // batch_size + 1, batch_size)
    order = list(GlobalOrder(length, seed))
    expected = [order[start : start + together] for start in range(0, length, together)]
    assert [sorted(batch) for batch in seen] == [sorted(batch) for batch in expected]


@pytest.mark.promise("run-resumed-other-numbers-workers")
@given(LENGTHS, NUMBERS, NUMBERS, st.lists(st.tuples(WORLDS, st.integers(0, 6), st.integers(1, 6)), max_size=4), WORLDS)
def test_samplers_resumed_on_another_worker_count_continue_the_same_global_order(
    length, seed, epoch, parts, last_world
):
    order = list(GlobalOrder(length, seed, epoch))
    state, seen = None, []
    for world_size, steps, batch_size in parts:
        made = samplers(length, world_size, seed=seed)
        for sampler in made:
            sampler.set_epoch(epoch)
            if state is not None:
                sampler.load_state_dict(state)
        seen += [sample for batch in consume(made, steps, batch_size) for sample in batch]
        # The state must survive JSON, so that any checkpoint format can store it.
        state = json.loads(json.dumps(made[0].state_dict()))
        assert state["position"] == len(seen)
        assert sorted(seen) == sorted(order[: len(seen)])
    rest = samplers(length, last_world, seed=seed)
    for sampler in rest:
        sampler.set_epoch(epoch)
        if state is not None:
            sampler.load_state_dict(state)
    left = [list(sampler) for sampler in rest]
    dealt = [left[place % last_world][place // last_world] for place in range(length - len(seen))]
    assert dealt == order[len(seen) :]


@given(st.integers(1, 60), st.integers(1, 60), WORLDS, st.integers(0, 60))
def test_sampler_state_dict_with_consumed_equals_the_state_after_advance_by_the_same_count(
    length, other, world_size, used
):
    told, counted = samplers(length, world_size)[0], samplers(length, world_size)[0]
    used = min(used, len(told))
    list(told), list(counted)
    counted.advance(used)
    assert told.state_dict(consumed=used) == counted.state_dict()


def test_sampler_state_excludes_prefetched_samples():
    sampler = DistributedSampler(100, 0, 2)
    drawn = iter(sampler)
    for _ in range(50):
        next(drawn)
    sampler.advance(8)
    assert sampler.state_dict()["position"] == 16
    assert sampler.state_dict(consumed=10)["position"] == 20


def test_saving_sampler_state_within_an_epoch_requires_the_number_of_consumed_samples():
    sampler = DistributedSampler(100, 0, 2)
    assert sampler.state_dict()["position"] == 0
    next(iter(sampler))
    with pytest.raises(DataError, match=r"how many were used is not known. Call sampler\.advance\(len\(x\)\)"):
        sampler.state_dict()


def test_sampler_advance_refuses_more_samples_than_its_own_rank_has_drawn():
    sampler = DistributedSampler(100, 0, 2)
    drawn = iter(sampler)
    for _ in range(8):
        next(drawn)
    with pytest.raises(
        DataError, match=r"advance\(16\): .* 16 samples used, but rank 0 has been handed 8.*own samples"
    ):
        sampler.advance(16)
    with pytest.raises(DataError, match="consumed=9"):
        sampler.state_dict(consumed=9)
    with pytest.raises(DataError, match="consumed=-1"):
        sampler.state_dict(consumed=-1)
    with pytest.raises(DataError, match=r"advance\(1\.5\): a number of samples is an integer"):
        sampler.advance(1.5)
    sampler.advance(8)
    assert sampler.state_dict()["position"] == 16


def test_sampler_length_is_the_number_of_samples_left_for_the_next_iteration():
    sampler = DistributedSampler(10, 1, 3)
    assert len(sampler) == 3
    sampler.load_state_dict({**sampler.state_dict(), "position": 4})
    assert len(sampler) == 2
    assert len(list(sampler)) == 2


def test_only_the_first_iteration_starts_at_the_resumed_position():
    sampler = DistributedSampler(10, 0, 1)
    sampler.load_state_dict({**sampler.state_dict(), "position": 4})
    # Reading only the first sample does not use up the resumed position, so the next iteration starts there too.
    next(iter(sampler))
    assert len(list(sampler)) == 6
    assert len(list(sampler)) == 10


def test_set_epoch_keeps_a_resumed_position_only_for_the_resumed_epoch():
    sampler = DistributedSampler(10, 0, 1)
    sampler.load_state_dict({**sampler.state_dict(), "epoch": 3, "position": 4})
    assert sampler.epoch == 3
    sampler.set_epoch(3)
    assert list(sampler) == list(GlobalOrder(10, 0, 3))[4:]
    sampler.set_epoch(4)
    assert list(sampler) == list(GlobalOrder(10, 0, 4))


@pytest.mark.parametrize("drop_last", [False, True])
def test_state_at_the_end_of_an_epoch_resumes_the_next(drop_last):
    sampler = DistributedSampler(11, 0, 2, drop_last=drop_last)
    sampler.set_epoch(4)
    sampler.advance(len(list(sampler)))
    state = sampler.state_dict()
    resumed = DistributedSampler(11, 0, 2, drop_last=drop_last)
    resumed.load_state_dict(state)
    assert resumed.epoch == 5
    # A program that sets the finished epoch again gets no samples, even if it iterates twice.
    resumed.set_epoch(4)
    assert list(resumed) == list(resumed) == []
    resumed.set_epoch(5)
    assert len(list(resumed)) == len(DistributedSampler(11, 0, 2, drop_last=drop_last))
    # If the loop has already set the next epoch, loading an older state must not reset the epoch.
    late = DistributedSampler(11, 0, 2, drop_last=drop_last)
    late.set_epoch(5)
    late.load_state_dict(state)
    assert (late.epoch, len(late)) == (5, len(resumed))


def test_samples_drawn_from_an_older_iterator_cannot_be_counted_by_advance():
    sampler = DistributedSampler(10, 0, 1)
    old, new = iter(sampler), iter(sampler)
    next(old)
    next(new)
    list(old)
    with pytest.raises(DataError, match="has been handed 1 in"):
        sampler.advance(2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 99}, "is of length=99, but this sampler has length=10"),
        ({"seed": 1}, "is of seed=1, but this sampler has seed=0"),
        ({"shuffle": False}, "is of shuffle=False, but"),
        ({"version": 2}, "is of version=2, but"),
        ({"position": 11}, r"position=11; .* one of 0 \.\. 10"),
        ({"position": -1}, "position=-1"),
        ({"position": "4"}, "position='4'"),
        ({"epoch": None}, "epoch=None"),
    ],
)
def test_state_of_another_dataset_is_refused_and_changes_no_setting(change, message):
    sampler = DistributedSampler(10, 0, 1)
    state = sampler.state_dict()
    with pytest.raises(DataError, match=message):
        sampler.load_state_dict({**state, **change})
    assert sampler.state_dict() == state


def test_invalid_sampler_state_is_refused():
    with pytest.raises(DataError, match=r"has no 'version'; load what DistributedSampler\.state_dict\(\) gave"):
        DistributedSampler(10, 0, 1).load_state_dict({"yielded": 3})


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((-1,), {}, "length=-1"),
        ((iter([1]),), {}, "list_iterator, which is not a number and has no length"),
        ((10, 3, 2), {}, "rank=3 with world_size=2"),
        ((10, 0), {}, "give both"),
        ((10,), {"drop_last": True, "pad": True}, "either left out or filled up"),
        ((10,), {"seed": "x"}, "seed='x'"),
    ],
)
def test_invalid_sampler_arguments_are_refused(arguments, options, message):
    with pytest.raises(DataError, match=message):
        DistributedSampler(*arguments, **options)


def test_sampler_reads_its_rank_from_the_launchers_variables(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert sorted(DistributedSampler(5, shuffle=False)) == [1, 3]
    monkeypatch.delenv("RANK")
    with pytest.raises(RunContextError, match="RANK=None"):
        DistributedSampler(5)


def test_distributed_sampler_does_not_import_torch():
    code = "import sys; from paceline.data import DistributedSampler; list(DistributedSampler(9)); print('torch' in sys.modules)"
    assert run_python(code).strip() == "False"


# --- tests with torch


class Numbers:
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        return number


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader_yields_the_ranks_samples_in_order_and_continues_from_a_loaded_sampler_state(workers):
    data = pytest.importorskip("torch.utils.data")
    dataset = Numbers(50)
    sampler = DistributedSampler(dataset, 1, 2, seed=5)
    loader = data.DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=workers)
    sampler.set_epoch(2)
    assert len(loader) == 7
    expected = GlobalOrder(50, 5, 2)[1::2].tolist()
    seen = []
    for step, batch in enumerate(loader):
        seen += batch.tolist()
        sampler.advance(len(batch))
        if step == 2:
            state = sampler.state_dict()
            break
    assert seen == expected[:12]
    other = DistributedSampler(dataset, 1, 2, seed=5)
    other.load_state_dict(state)
    loader = data.DataLoader(dataset, batch_size=4, sampler=other, num_workers=workers)
    assert len(loader) == 4
    assert [sample for batch in loader for sample in batch.tolist()] == expected[12:]


def test_batch_sampler_over_the_distributed_sampler_yields_batches_of_the_samples_of_the_rank():
    data = pytest.importorskip("torch.utils.data")
    sampler = DistributedSampler(10, 0, 2, shuffle=False)
    batches = data.BatchSampler(sampler, batch_size=2, drop_last=True)
    loader = data.DataLoader(Numbers(10), batch_sampler=batches)
    assert [batch.tolist() for batch in loader] == [[0, 2], [4, 6]]


def test_sampler_reads_its_rank_from_an_initialised_process_group(tmp_path):
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_gloo_available():
        pytest.skip("needs torch with Gloo")
    (tmp_path / "rank.py").write_text("""
import sys, torch.distributed as dist
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
from paceline.data import DistributedSampler
print(*DistributedSampler(5, shuffle=False))
# Where one leaves while the other still connects to it, that is an error of the other's.
dist.barrier()
dist.destroy_process_group()
""")
    # OMPI_COMM_WORLD_SIZE without a rank variable would be an error, but the sampler takes its rank from torch's
    # process group.
    environment = {**os.environ, "OMPI_COMM_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}

    def printed(rank):
        words = (str(tmp_path / "rank.py"), str(rank), str(tmp_path / "store"))
        done = run_alone(*words, loaded=TORCH, environment=environment, timeout_s=180, frees=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(printed, range(2))) == [["0", "2", "4"], ["1", "3"]]


@pytest.fixture
def stateful_loader():
    """torchdata's StatefulDataLoader."""
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        StatefulDataLoader = None  # noqa: N806
    require_engine("torchdata", StatefulDataLoader)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*set_vital.*")
        yield StatefulDataLoader


@pytest.mark.parametrize(
    ("batch_size", "workers"), [(3, 0), (None, 0), (3, 2), pytest.param(None, 2, marks=pytest.mark.proof)]
)
def test_stateful_data_loader_resumes_without_calls_of_advance(stateful_loader, batch_size, workers):
    def loaders(world_size, rank):
        sampler = DistributedSampler(40, rank, world_size, seed=3)
        return sampler, stateful_loader(Numbers(40), batch_size=batch_size, sampler=sampler, num_workers=workers)

    sampler, loader = loaders(2, 1)
    sampler.set_epoch(4)
    every = [str(batch) for batch in loader]
    # Stop the loader after different numbers of batches. With worker processes each loader starts two processes, so
    # test fewer of these numbers.
    for stop in (3, len(every)) if workers else (1, 3, len(every) - 1, len(every)):
        sampler, loader = loaders(2, 1)
        sampler.set_epoch(4)
        iterator = iter(loader)
        head = [str(next(iterator)) for _ in range(stop)]
        if stop == len(every):
            assert next(iterator, None) is None
        state = loader.state_dict()
        sampler, loader = loaders(2, 1)
        loader.load_state_dict(state)
        sampler.set_epoch(4)
        assert head + [str(batch) for batch in loader] == every
        sampler.set_epoch(5)
        assert len(list(loader)) == len(every)
    # If the state of a finished epoch is loaded and the loop sets the next epoch, the loader returns all samples of that epoch.
    sampler, loader = loaders(2, 1)
    loader.load_state_dict(state)
    sampler.set_epoch(5)
    assert len(list(loader)) == len(every)
    assert sampler.epoch == 5
