"""What each rank finds in its environment."""

from __future__ import annotations

from paceline.compat.horovod.runner.hosts import Slot
from paceline.compat.horovod.runner.ranks import RankEnd, threads, with_defaults


def slot(host: str, rank: int, local_rank: int, local_size: int) -> Slot:
    return Slot(host=host, rank=rank, local_rank=local_rank, local_size=local_size, cross_rank=0, cross_size=1)


def test_omp_threads_are_the_cores_of_each_host_divided_by_its_ranks():
    """Regression: OMP_NUM_THREADS was computed from the cores of the machine that ran horovodrun, instead of each
    host's cores."""
    slots = [slot("big", 0, 0, 2), slot("big", 1, 1, 2), slot("small", 2, 0, 3), slot("bound", 3, 0, 2)]
    slots += [slot("bound", 4, 1, 2)]
    cores = [range(16), range(16), range(2), range(4), range(4, 8)]
    ranks = [RankEnd(host=one.host, hello={"cores": list(numbers)}) for one, numbers in zip(slots, cores, strict=True)]
    assert threads(slots, ranks) == [8, 8, 1, 4, 4]


def test_users_omp_num_threads_is_kept():
    assert with_defaults({}, 8, is_one_machine=False)["OMP_NUM_THREADS"] == "8"
    assert with_defaults({"OMP_NUM_THREADS": "2"}, 8, is_one_machine=False)["OMP_NUM_THREADS"] == "2"


def test_ranks_share_a_hash_seed_unless_it_is_set():
    assert with_defaults({}, 8, is_one_machine=False)["PYTHONHASHSEED"] == "0"
    assert with_defaults({"PYTHONHASHSEED": "7"}, 8, is_one_machine=False)["PYTHONHASHSEED"] == "7"
