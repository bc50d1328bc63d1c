"""Each collective of torch.distributed over MPI, on 1 and 3 ranks; on 4 if the number of ranks matters.

On 2 ranks whole models run (test_models.py).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest

from tests.torch_mpi.test_world import main, run_checks

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTS = ("uint8", "int8", "int16", "int32", "int64")
COMPLEX = ("complex64", "complex128")
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (1,), (7,), (3, 4), (2, 0, 5))


def _value(rank: int, shape: tuple[int, ...], dtype: Any) -> Any:
    """Small whole numbers, other ones on each rank: exact in every dtype."""
    import torch

    count = torch.Size(shape).numel()
    return ((torch.arange(count) % 5) + rank + 1).reshape(shape).to(dtype)


def all_reduce_gives_the_reduction_for_every_dtype_and_shape(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    kinds = {
        "SUM": lambda stack: stack.sum(0),
        "PRODUCT": lambda stack: stack.prod(0),
        "MIN": lambda stack: stack.amin(0),
        "MAX": lambda stack: stack.amax(0),
        "AVG": lambda stack: stack.sum(0) / size,
    }
    for name in FLOATS + INTS + COMPLEX:
        dtype = getattr(torch, name)
        for shape in SHAPES:
            stack = torch.stack([_value(r, shape, torch.float64) for r in range(size)])
            for op, expected in kinds.items():
                if dtype.is_complex and op not in ("SUM", "AVG"):
                    continue
                if op == "PRODUCT" and name in ("int8", "uint8"):
                    continue
                tensor = _value(rank, shape, dtype)
                dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
                wanted = expected(stack).trunc() if name in INTS else expected(stack)
                torch.testing.assert_close(tensor, wanted.to(dtype), msg=f"{op} {name} {shape}")


def all_reduce_of_integers_and_booleans_works_on_their_bits(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    for op, wanted in (("BAND", 0b1000), ("BOR", 0b1000 | (1 << size) - 1)):
        tensor = torch.tensor([0b1000 | 1 << rank], dtype=torch.int32)
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
        if size > 1:
            assert tensor.item() == wanted, op
    tensor = torch.tensor([rank], dtype=torch.uint8)
    dist.all_reduce(tensor, op=dist.ReduceOp.BXOR)
    assert tensor.item() == [0, 1, 3, 0][size - 1]
    for op, flags in (("SUM", [True, size == 1]), ("MIN", [size == 1, False]), ("MAX", [True, size == 1])):
        tensor = torch.tensor([rank == 0, op != "MIN" and size == 1])
        dist.all_reduce(tensor, op=getattr(dist.ReduceOp, op))
        assert tensor.tolist() == flags, (op, tensor)


def halves_are_added_in_float32(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    # In bfloat16, 256 + 1 is 256 again, and the ones of the other ranks would be lost one by one.
    tensor = torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16)
    dist.all_reduce(tensor)
    assert tensor == torch.tensor([256.0 + size - 1]).bfloat16()


def tensors_that_are_not_contiguous_are_reduced_where_they_lie(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    whole = torch.zeros(4, 6)
    view = whole[:, ::2].t()
    view.fill_(float(rank + 1))
    dist.all_reduce(view)
    assert whole[:, ::2].eq(size * (size + 1) / 2).all()
    assert whole[:, 1::2].eq(0).all()
    conjugate = torch.full((3,), complex(1, 2)).conj()
    from paceline.torch_mpi import calls  # torch itself reduces complex numbers as pairs of real ones.

    dist.group.WORLD._start(calls.all_reduce([conjugate], dist.ReduceOp.SUM, size), None).wait()
    assert conjugate.tolist() == [complex(size, -2 * size)] * 3
    view = whole[:, ::2]
    dist.broadcast(view, src=size - 1)
    part = torch.empty(2, 3 * size).t()
    dist.all_gather_into_tensor(part, torch.full((3, 2), float(rank)))
    assert part[:, 0].tolist() == [float(r) for r in range(size) for _ in range(3)]


def what_cannot_be_reduced_is_refused_and_the_group_goes_on(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    from paceline.collectives.errors import CollectivesError

    ones = torch.ones(2)
    for op, tensor, words in (
        (dist._make_nccl_premul_sum(2.0), ones, "doesn't have it"),
        (dist.ReduceOp.BAND, ones, "bits of floating-point numbers"),
        (dist.ReduceOp.AVG, torch.tensor([True]), "mean of booleans"),
        (dist.ReduceOp.SUM, torch.ones(2, device="meta"), "on meta"),
    ):
        with pytest.raises(CollectivesError, match=words):
            dist.all_reduce(tensor, op=op)
    dist.all_reduce(ones)
    assert ones.tolist() == [size, size]


def a_rank_that_is_not_in_the_group_is_refused_and_the_group_goes_on(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    one = torch.ones(1)
    for call in (
        lambda: dist.broadcast(one, size),
        lambda: dist.reduce(one, size),
        lambda: dist.scatter(one, None, size),
        lambda: dist.gather(one, None, size),
        lambda: dist.group.WORLD.send([one], size, 0),
        lambda: dist.group.WORLD.recv([one], size, 0),
    ):
        with pytest.raises(RuntimeError, match=f"rank {size} is not in the group, whose ranks are 0 to {size - 1}"):
            call()
    dist.all_reduce(one)
    assert one.item() == size


def a_forked_child_is_refused_and_the_group_goes_on(rank: int, size: int) -> None:
    # Regression: a collective in a forked child used the MPI connection of its parent, and the parent crashed when it
    # finalised MPI.
    import os

    import torch
    import torch.distributed as dist

    child = os.fork()
    if child == 0:
        told = 0
        for how in (False, True):
            try:
                dist.all_reduce(torch.ones(1), async_op=how)
            except RuntimeError as error:
                told += "was forked from a rank" in str(error)
        os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == size


def ranks_that_call_different_things_are_told_so_and_go_on(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    from paceline.collectives.errors import MismatchError

    if size == 1:
        return
    with pytest.raises(MismatchError, match=r"rank 0 of the group: all_reduce SUM\(3 of float32"):
        dist.all_reduce(torch.ones(3 if rank == 0 else 4))
    start = dist.broadcast if rank == 1 else dist.all_reduce
    work = start(torch.ones(3), **({"src": 0} if rank == 1 else {}), async_op=True)
    with pytest.raises(MismatchError, match=r"rank 1 of the group: broadcast from rank 0"):
        work.wait()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor[0] == size


def broadcast_reduce_gather_and_scatter_know_their_root(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    for root in range(size):
        for dtype in (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex128):
            tensor = _value(rank, (3, 2), dtype)
            dist.broadcast(tensor, src=root)
            assert tensor.equal(_value(root, (3, 2), dtype))
        tensor = _value(rank, (4,), torch.float32)
        dist.reduce(tensor, dst=root, op=dist.ReduceOp.SUM)
        total = sum(_value(r, (4,), torch.float32) for r in range(size))
        assert tensor.equal(total if rank == root else _value(rank, (4,), torch.float32))
        parts = [torch.empty(2, 2) for _ in range(size)] if rank == root else None
        dist.gather(torch.full((2, 2), float(rank)), parts, dst=root)
        if parts is not None:
            assert [part[1, 1].item() for part in parts] == list(range(size))
        given = [torch.full((3,), r, dtype=torch.bfloat16) for r in range(size)] if rank == root else None
        out = torch.empty(3, dtype=torch.bfloat16)
        dist.scatter(out, given, src=root)
        assert out.tolist() == [rank] * 3


def sums_of_short_integers_wrap_as_torchs_own_do(rank: int, size: int) -> None:
    """Regression: for arrays of a few elements or more, sums by Open MPI's AVX code stopped at the largest integer,
    instead of wrapping around."""
    import torch
    import torch.distributed as dist

    for name in ("int8", "uint8", "int16"):
        dtype = getattr(torch, name)
        large = torch.iinfo(dtype).max - 3
        wanted = torch.full((100,), large, dtype=dtype) * size
        given = torch.full((100,), large, dtype=dtype)
        dist.all_reduce(given)
        assert given.equal(wanted), (name, given, wanted)
        on_root = torch.full((100,), large, dtype=dtype)
        dist.reduce(on_root, 0)
        assert rank or on_root.equal(wanted), (name, on_root)
        part = torch.empty(100, dtype=dtype)
        dist.reduce_scatter_tensor(part, torch.full((100 * size,), large, dtype=dtype))
        assert part.equal(wanted), (name, part)
        dist.reduce_scatter(part.zero_(), [torch.full((100,), large, dtype=dtype) for _ in range(size)])
        assert part.equal(wanted), (name, part)


def gathering_fits_the_pieces_together(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    for dtype in (torch.float32, torch.float16, torch.bool, torch.uint8, torch.complex64):
        parts = [torch.empty(2, 3, dtype=dtype) for _ in range(size)]
        dist.all_gather(parts, _value(rank, (2, 3), dtype))
        assert all(part.equal(_value(r, (2, 3), dtype)) for r, part in enumerate(parts))
        whole = torch.empty(2 * size, 3, dtype=dtype)
        dist.all_gather_into_tensor(whole, _value(rank, (2, 3), dtype))
        assert whole.equal(torch.cat(parts))
    ragged = [torch.empty(r, 2) for r in range(size)]
    dist.all_gather(ragged, torch.full((rank, 2), float(rank)))
    assert all(part.eq(r).all() for r, part in enumerate(ragged))
    # FSDP gathers in place: its shard is a part of the output.
    whole = torch.zeros(4 * size)
    mine = whole[4 * rank : 4 * rank + 4]
    mine.fill_(rank + 1.0)
    dist.all_gather_into_tensor(whole, mine)
    assert whole.tolist() == [r + 1.0 for r in range(size) for _ in range(4)]


def scattered_reductions_give_each_rank_its_part(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        source = torch.arange(2 * size).to(dtype) + rank
        out = torch.empty(2, dtype=dtype)
        dist.reduce_scatter_tensor(out, source)
        offset = sum(range(size))
        assert out.tolist() == [size * (2 * rank + i) + offset for i in range(2)], (dtype, out)
    ragged = [torch.full((r + 1,), float(r)) for r in range(size)]
    out = torch.empty(rank + 1)
    dist.reduce_scatter(out, ragged, op=dist.ReduceOp.AVG)
    assert out.tolist() == [float(rank)] * (rank + 1)


def all_to_all_moves_every_piece_to_its_rank(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    from paceline.collectives.errors import CollectivesError

    sent = [torch.full((rank + to,), 10.0 * rank + to) for to in range(size)]
    got = [torch.empty(rank + source) for source in range(size)]
    dist.all_to_all(got, sent)
    assert all(part.eq(10.0 * source + rank).all() for source, part in enumerate(got))
    rows = torch.arange(size * 2.0).reshape(size, 2) + 100 * rank
    out = torch.empty(size, 2)
    dist.all_to_all_single(out, rows)
    assert out[:, 0].tolist() == [2.0 * rank + 100 * source for source in range(size)]
    splits = [to + 1 for to in range(size)]
    out = torch.empty(size * (rank + 1), 3, dtype=torch.bfloat16)
    dist.all_to_all_single(out, torch.full((sum(splits), 3), rank).bfloat16(), [rank + 1] * size, splits)
    assert out[:, 1].tolist() == [float(source) for source in range(size) for _ in range(rank + 1)]
    if size > 1:
        with pytest.raises(CollectivesError, match="don't fit together"):
            dist.all_to_all_single(
                torch.empty(size + (rank == 0)), torch.empty(size), [1] * (size - 1) + [1 + (rank == 0)], [1] * size
            )


def coalesced_collectives_are_those_of_each_tensor(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    tensors = [torch.full((n,), rank + 1.0) for n in (1, 0, 5)]
    with dist.distributed_c10d._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert all(tensor.eq(size * (size + 1) / 2).all() for tensor in tensors)
    wholes = [torch.empty(2 * size), torch.empty(3 * size)]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for whole, n in zip(wholes, (2, 3), strict=True):
            dist.all_gather_into_tensor(whole, torch.full((n,), float(rank)))
    manager.wait()
    assert [whole[-1].item() for whole in wholes] == [size - 1.0] * 2


def sparse_tensors_are_added(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    indices = torch.tensor([[0, rank + 1, rank + 1]])
    sparse = torch.sparse_coo_tensor(indices, torch.ones(3, 2), (6, 2), check_invariants=False)
    dist.all_reduce(sparse)
    wanted = torch.zeros(6, 2)
    for r in range(size):
        wanted[0] += 1
        wanted[r + 1] += 2
    assert sparse.to_dense().equal(wanted)
    empty = torch.sparse_coo_tensor(
        torch.empty(1, 0 if rank == 0 else 1, dtype=torch.int64).zero_(),
        torch.ones(0 if rank == 0 else 1, 3),
        (2, 3),
        check_invariants=False,
    )
    dist.all_reduce(empty)
    assert empty.to_dense()[0].tolist() == [size - 1.0] * 3


def handles_and_their_futures_tell_what_happened(rank: int, size: int) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    tensors = [torch.full((1000,), float(i)) for i in range(30)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for number, work in reversed(list(enumerate(works))):
        doubled = work.get_future().then(lambda future: future.value()[0] * 2).wait()
        assert doubled[0] == 2 * number * size
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert work.wait(timedelta(seconds=120))
        assert work.result()[0] is tensors[number]
    # A callback may begin another collective, and wait for it, as PowerSGD's hook does.
    one, two = torch.ones(1), torch.ones(1)

    def again(future: Any) -> Any:
        return dist.all_reduce(two, async_op=True).get_future().wait()[0]

    gate = torch.ones(1_000_000)
    dist.all_reduce(gate, async_op=True)
    assert dist.all_reduce(one, async_op=True).get_future().then(again).wait().item() == size


def messages_find_their_receiver_by_rank_and_tag(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    if size == 1:
        return
    after, before = (rank + 1) % size, (rank - 1) % size
    # All ranks start to receive before they send, which must not be a deadlock.
    for numel in (0, 3, 1_000_000):
        second, first = torch.empty(numel), torch.empty(numel)
        works = [dist.irecv(second, src=before, tag=2), dist.irecv(first, src=before, tag=1)]
        works += [dist.isend(torch.full((numel,), rank + 0.1), dst=after, tag=1)]
        works += [dist.isend(torch.full((numel,), rank + 0.2), dst=after, tag=2)]
        for work in works:
            work.wait()
        assert first.eq(torch.tensor(before + 0.1)).all()
        assert second.eq(torch.tensor(before + 0.2)).all()
    if rank == 0:
        seen = []
        for _ in range(size - 1):
            cells = torch.zeros(2, 2, dtype=torch.bfloat16).t()
            source = dist.recv(cells, tag=9)
            assert cells[1, 0] == source
            seen.append(source)
        assert sorted(seen) == list(range(1, size))
    else:
        dist.send(torch.full((2, 2), float(rank), dtype=torch.bfloat16), dst=0, tag=9)
    # The memory of this tensor holds the negated values.
    negated = torch.zeros(1, dtype=torch.complex64).conj().imag
    assert negated.is_neg()
    assert negated.is_contiguous()
    work = dist.isend(torch.tensor([rank + 1.0]), dst=after, tag=3)
    dist.recv(negated, src=before, tag=3)
    work.wait()
    assert negated.tolist() == [before + 1.0]
    operations = [
        dist.P2POp(dist.isend, torch.full((4,), float(rank)), after),
        dist.P2POp(dist.irecv, got := torch.empty(4), before),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    assert got.eq(before).all()


def a_message_of_another_size_is_an_error(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    if size == 1 or rank > 1:
        return
    if rank == 0:
        dist.send(torch.ones(3), dst=1)
        dist.send(torch.ones(5), dst=1)
    else:
        for words in ("wants 16 bytes, but rank 0 has sent 12", "another size"):
            with pytest.raises(RuntimeError, match=words):
                dist.recv(torch.empty(4), src=0)


def objects_travel(rank: int, size: int) -> None:
    import torch.distributed as dist

    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "ü" * rank})
    assert [item["text"] for item in objects] == ["ü" * r for r in range(size)]
    shared = [("a", 1), None] if rank == 0 else [None, None]
    dist.broadcast_object_list(shared, src=0)
    assert shared == [("a", 1), None]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, list(range(size)) if rank == 0 else None, src=0)
    assert mine == [rank]


def groups_of_some_ranks_have_ranks_of_their_own(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    members = list(range(size))[::-1][: max(1, size - 1)]
    group = dist.new_group(members)
    last = dist.new_group([size - 1])
    if rank in members:
        tensor = torch.tensor([rank])
        dist.all_reduce(tensor, group=group)
        assert tensor.item() == sum(members)
        dist.broadcast(tensor.fill_(rank), src=size - 1, group=group)
        assert tensor.item() == size - 1
        assert dist.get_group_rank(group, rank) == sorted(members).index(rank)
        dist.destroy_process_group(group)
    else:
        assert dist.get_rank(group) == -1
    if rank == size - 1:
        dist.barrier(group=last)
    if size >= 2:
        groups, _ = dist.new_subgroups(1)
        assert dist.get_world_size(groups) == 1


def functional_collectives_work_on_the_group(rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    world = dist.group.WORLD
    wait = functional.wait_tensor
    total = wait(functional.all_reduce(torch.full((3,), rank + 1.0), "sum", world))
    assert total.tolist() == [size * (size + 1) / 2] * 3
    whole = wait(functional.all_gather_tensor(torch.full((2,), float(rank)), 0, world))
    assert whole.tolist() == [float(r) for r in range(size) for _ in range(2)]
    part = wait(functional.reduce_scatter_tensor(torch.arange(2.0 * size), "avg", 0, world))
    assert part.tolist() == [2.0 * rank, 2.0 * rank + 1]
    moved = wait(functional.all_to_all_single(torch.arange(float(size)), None, None, world))
    assert moved.tolist() == [float(rank)] * size
    sent = wait(functional.broadcast(torch.tensor([rank]), 0, world))
    assert sent.item() == 0
    many = functional.all_reduce_coalesced([torch.ones(1), torch.ones(2)], "max", world)
    assert [wait(one)[0].item() for one in many] == [1.0, 1.0]


CHECKS = (
    all_reduce_gives_the_reduction_for_every_dtype_and_shape,
    all_reduce_of_integers_and_booleans_works_on_their_bits,
    halves_are_added_in_float32,
    sums_of_short_integers_wrap_as_torchs_own_do,
    tensors_that_are_not_contiguous_are_reduced_where_they_lie,
    what_cannot_be_reduced_is_refused_and_the_group_goes_on,
    a_rank_that_is_not_in_the_group_is_refused_and_the_group_goes_on,
    a_forked_child_is_refused_and_the_group_goes_on,
    ranks_that_call_different_things_are_told_so_and_go_on,
    broadcast_reduce_gather_and_scatter_know_their_root,
    gathering_fits_the_pieces_together,
    scattered_reductions_give_each_rank_its_part,
    all_to_all_moves_every_piece_to_its_rank,
    coalesced_collectives_are_those_of_each_tensor,
    sparse_tensors_are_added,
    handles_and_their_futures_tell_what_happened,
    messages_find_their_receiver_by_rank_and_tag,
    a_message_of_another_size_is_an_error,
    objects_travel,
    groups_of_some_ranks_have_ranks_of_their_own,
    functional_collectives_work_on_the_group,
)


#: Collectives whose algorithm depends on the number of ranks: it halves the ranks, distributes parts to them, or uses
#: the bits of their number.
LOOK_AT_THE_NUMBER = (
    all_reduce_of_integers_and_booleans_works_on_their_bits,
    broadcast_reduce_gather_and_scatter_know_their_root,
    scattered_reductions_give_each_rank_its_part,
    all_to_all_moves_every_piece_to_its_rank,
    messages_find_their_receiver_by_rank_and_tag,
    groups_of_some_ranks_have_ranks_of_their_own,
)


@pytest.fixture(scope="session")
def failed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, str]]:
    """Number of ranks -> the checks that failed on any of so many."""

    @functools.cache
    def run(ranks: int) -> dict[str, str]:
        return run_checks(__file__, ranks, tmp_path_factory.mktemp("group"))

    return run


@pytest.mark.parametrize(
    ("ranks", "check"),
    [
        pytest.param(ranks, check.__name__, marks=[pytest.mark.proof] if ranks == 4 else [])
        for ranks, checks in ((1, CHECKS), (3, CHECKS), (4, LOOK_AT_THE_NUMBER))
        for check in checks
    ],
)
def test_each_check_of_the_collectives_over_mpi_passes_on_every_rank(
    failed: Callable[[int], dict[str, str]], ranks: int, check: str
) -> None:
    assert check not in failed(ranks), failed(ranks)[check]


if __name__ == "__main__":
    main(LOOK_AT_THE_NUMBER if os.environ.get("OMPI_COMM_WORLD_SIZE") == "4" else CHECKS)
