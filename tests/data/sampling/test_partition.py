from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data import partition, split_by_size
from paceline.data.sampling.world import own_rank
from paceline.errors import DataError, RunContextError

FILES = st.dictionaries(st.text(max_size=8), st.integers(0, 1 << 40), max_size=40)


@pytest.mark.promise("file-exactly-one-part-parts")
@settings(max_examples=40)
@given(FILES, st.integers(1, 12), st.randoms(use_true_random=False))
def test_split_by_size_covers_all_files_in_balanced_parts(files, parts, rng):
    sizes = list(files.items())
    made = split_by_size(sizes, parts)
    assert len(made) == parts
    assert sorted(name for part in made for name in part) == sorted(files)
    loads = [sum(files[name] for name in part) for part in made]
    assert max(loads) - min(loads) <= max(files.values(), default=0)
    # The result does not depend on the order in which a store lists the files.
    rng.shuffle(sizes)
    assert split_by_size(sizes, parts) == made


def test_split_by_size_places_large_files_first_and_ties_in_the_lowest_part():
    assert split_by_size([("d", 1), ("a", 3), ("c", 2), ("b", 3)], 2) == [["a", "c"], ["b", "d"]]


def test_more_parts_than_files_leaves_parts_empty():
    assert split_by_size([("a", 5)], 3) == [["a"], [], []]
    assert split_by_size([], 2) == [[], []]


def test_empty_files_are_spread_over_the_parts():
    sizes = [(f"f{number}", 0) for number in range(10)]
    assert [len(part) for part in split_by_size(sizes, 2)] == [5, 5]


@pytest.mark.parametrize(
    ("sizes", "parts", "message"),
    [
        ([], 0, "parts=0: files are split into one part or more"),
        ([], -1, "parts=-1"),
        ([], 1.0, r"parts=1\.0"),
        ([], True, "parts=True"),
        ([("a", 1), ("a", 2)], 2, "'a' comes twice"),
        ([("a", -1)], 2, "a size of -1 bytes"),
    ],
)
def test_invalid_split_is_refused(sizes, parts, message):
    with pytest.raises(DataError, match=message):
        split_by_size(sizes, parts)


@given(st.integers(0, 200), st.integers(1, 20))
def test_partition_gives_each_item_to_one_rank(length, world_size):
    for items in (list(range(length)), range(length), np.arange(length), tuple(range(length))):
        parts = [partition(items, rank, world_size) for rank in range(world_size)]
        assert sorted(int(item) for part in parts for item in part) == list(range(length))
        assert [int(item) for item in parts[0]] == list(range(0, length, world_size))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_partition_of_an_array_or_range_is_a_view():
    array = np.zeros((10, 3))
    assert np.shares_memory(partition(array, 1, 4), array)
    assert partition(range(10), 1, 4) == range(1, 10, 4)


def test_partition_of_a_torch_tensor_is_a_view():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(10)
    part = partition(tensor, 1, 4)
    part[0] = 99
    assert tensor[1] == 99
    assert part.tolist() == [99, 5, 9]


def test_partition_of_a_frame_selects_rows():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1, 2, 3], "b": [4, 5, 6]})
    assert partition(frame, 0, 2)["b"].tolist() == [4, 6]


@pytest.mark.parametrize(("rank", "world_size", "rows"), [(0, 2, [1, 3]), (1, 2, [2]), (3, 4, [])])
def test_partition_of_a_pyarrow_table_or_record_batch_selects_rows(rank, world_size, rows):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"a": [1, 2, 3], "b": [4, 5, 6]})
    for items in (table, table.to_batches()[0]):
        assert partition(items, rank, world_size).to_pydict() == {"a": rows, "b": [row + 3 for row in rows]}


def test_partition_of_a_list_does_not_copy_it():
    items = ["a", "b", "c", "d", "e"]
    part = partition(items, 1, 2)
    items[3] = "changed"
    assert list(part) == ["b", "changed"]
    assert list(part[::-1]) == ["changed", "b"]
    assert part[-1] == "changed"
    with pytest.raises(IndexError):
        part[2]


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ({"b", "a"}, "set, whose order may differ"),
        ({"a": 1}.keys(), "dict_keys, whose order"),
        ({"a": 1}, "dict, whose order"),
        ("abc", "is one str"),
        ((item for item in "abc"), "generator, which has no length"),
        (iter([1]), "has no length"),
        (None, "NoneType"),
    ],
)
def test_unordered_or_unsized_items_are_refused(items, message):
    with pytest.raises(DataError, match=message):
        partition(items, 0, 2)


@pytest.mark.parametrize(
    ("rank", "world_size", "message"),
    [
        (2, 2, "rank=2 with world_size=2"),
        (-1, 2, "rank=-1"),
        (0, 0, "world_size=0"),
        (0, None, "give both"),
        (None, 2, "give both"),
        ("0", 2, "rank='0' must be an integer"),
        (0, 2.0, r"world_size=2\.0 must be an integer"),
        (True, 2, "rank=True must be an integer"),
    ],
)
def test_partition_refuses_a_rank_outside_the_world_size_or_of_a_wrong_type(rank, world_size, message):
    with pytest.raises(DataError, match=message):
        partition([1, 2, 3], rank, world_size)


def test_rank_is_read_from_the_launchers_variables(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert list(partition([0, 1, 2, 3, 4])) == [1, 4]
    # Explicit arguments override the variables RANK and WORLD_SIZE.
    assert list(partition([0, 1, 2], 0, 1)) == [0, 1, 2]


def test_process_without_a_launcher_gets_all_items():
    assert list(partition([0, 1, 2])) == [0, 1, 2]


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PACELINE_RUN_DIR", "/ws/runs/a_1_2"),
        ("TORCHELASTIC_RUN_ID", "abc"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("PMI_SIZE", "4"),
        ("HOROVOD_SIZE", "4"),
        ("SLURM_STEP_NUM_TASKS", "2"),
    ],
)
def test_missing_rank_variables_under_a_launcher_raise(variable, value):
    with pytest.raises(RunContextError, match=rf"RANK and WORLD_SIZE are not set.*{variable}={value}.*rank="):
        own_rank(environment={variable: value})


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"])
def test_process_started_alone_by_a_launcher_gets_rank_0_and_world_size_1(variable):
    assert own_rank(environment={variable: "1"}) == (0, 1)


@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "0"},
        {"WORLD_SIZE": "2"},
        {"RANK": "", "WORLD_SIZE": "2"},
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "²", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "0"},
    ],
)
def test_invalid_rank_or_world_size_variable_raises_an_error_that_names_both_variables(environment):
    with pytest.raises(RunContextError, match=r"RANK=.*WORLD_SIZE="):
        own_rank(environment=environment)


def test_split_of_many_files_is_independent_of_their_order():
    rng = random.Random(1)
    sizes = [(f"{number:05}", rng.randrange(1000)) for number in range(20_000)]
    assert split_by_size(sizes, 7) == split_by_size(sizes[::-1], 7)
