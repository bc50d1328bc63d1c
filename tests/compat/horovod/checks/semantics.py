"""The semantics that are easy to get wrong, each its own."""

from __future__ import annotations

import contextlib
import os
import warnings

import pytest
import torch


def check_average_is_the_default_operation_and_op_excludes_average(hvd):
    assert torch.equal(hvd.allreduce(torch.tensor([float(hvd.rank())])), torch.tensor([(hvd.size() - 1) / 2]))
    for call in (hvd.allreduce, hvd.allreduce_async, hvd.allreduce_, hvd.allreduce_async_):
        with pytest.raises(ValueError, match="The op parameter supersedes average"):
            call(torch.ones(1), average=True, op=hvd.Sum)
    with pytest.warns(DeprecationWarning, match="average"):
        assert hvd.allreduce(torch.ones(1), average=False).item() == hvd.size()
    with pytest.raises(ValueError, match=r"op=7 is not an operation.*hvd\.Sum"):
        hvd.allreduce(torch.ones(1), op=7)
    assert (hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product) == (0, 1, 2, 3, 4, 5)


def check_positional_arguments_of_allreduce_are_those_of_horovod(hvd):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        assert hvd.allreduce(torch.ones(1), False, "p", hvd.Compression.none).item() == hvd.size()
    assert hvd.allreduce_(torch.ones(1), None, "p", hvd.Sum).item() == hvd.size()


def check_averaged_integers_are_truncated_towards_zero(hvd):
    size, rank = hvd.size(), hvd.rank()
    total = size * (size + 1) // 2
    for dtype in (torch.int32, torch.int64):
        given = torch.tensor([rank + 1, -rank - 1], dtype=dtype)
        assert hvd.allreduce(given).tolist() == [int(total / size), -int(total / size)]
        scaled = hvd.allreduce(given, op=hvd.Sum, prescale_factor=0.6)
        each = [int((r + 1) * 0.6) for r in range(size)]
        assert scaled.tolist() == [sum(each), -sum(each)]
        assert hvd.allreduce(given, op=hvd.Sum, postscale_factor=0.5).tolist() == [int(total * 0.5), -int(total * 0.5)]


def check_float16_average_does_not_overflow(hvd):
    # 60000 is close to float16's largest number: a sum in float16 would be infinite.
    assert hvd.allreduce(torch.full((2,), 60000.0, dtype=torch.float16)).tolist() == [60000.0, 60000.0]


def check_mismatched_tensors_raise_on_every_rank_and_later_operations_work(hvd):
    if hvd.size() == 1:
        return
    rank = hvd.rank()
    wrong = [
        lambda: hvd.allreduce(torch.ones(2 + (rank > 0)), name="shape"),
        lambda: hvd.allreduce(torch.ones(2, dtype=torch.float32 if rank else torch.float64), name="dtype"),
        lambda: hvd.allreduce(torch.ones(2), name="op", op=hvd.Sum if rank else hvd.Max),
        lambda: hvd.allreduce(torch.ones(2), name="pre", prescale_factor=1.0 + rank),
        lambda: hvd.allreduce(torch.ones(2), name="post", postscale_factor=1.0 + rank),
        lambda: hvd.broadcast(torch.ones(2), min(rank, 1), name="root"),
        lambda: hvd.allgather(torch.ones(2, 2 + (rank > 0)), name="columns"),
    ]
    for call in wrong:
        with pytest.raises(hvd.HorovodInternalError, match=r"(?i)mismatch"):
            call()
        assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
    assert issubclass(hvd.HorovodInternalError, RuntimeError)


def check_invalid_arguments_on_one_rank_raise_value_error(hvd):
    size = hvd.size()
    rows = torch.ones(2 * size)
    for splits in (
        torch.ones(size, dtype=torch.int64),
        [2 * size + 1] + [0] * (size - 1),
        [1] * (size + 1),
        [-1] * size,
    ):
        with pytest.raises(ValueError, match="splits"):
            hvd.alltoall(rows, splits=splits)
    if size > 1:
        with pytest.raises(ValueError, match="share equally"):
            hvd.alltoall(torch.ones(2 * size + 1))
    with pytest.raises(ValueError, match=r"torch\.Tensor, not list"):
        hvd.allreduce_async([1.0])
    with pytest.raises(ValueError, match="is not among"):
        hvd.broadcast(rows, size)


def check_second_operation_of_the_same_name_in_flight_is_refused(hvd):
    if hvd.size() == 1:
        return
    # Only the last rank does not submit the operation, so that the operation can't finish early.
    last = hvd.size() - 1
    if hvd.rank() != last:
        handle = hvd.allreduce_async(torch.ones(2), name="twice")
        with pytest.raises(ValueError, match="same name as another tensor"):
            hvd.allreduce_async(torch.ones(2), name="twice")
    hvd.barrier()
    if hvd.rank() == last:
        handle = hvd.allreduce_async(torch.ones(2), name="twice")
    assert hvd.synchronize(handle).tolist() == [1, 1]
    assert hvd.allreduce(torch.ones(2), name="twice").tolist() == [1, 1]


def check_scalar_tensors_are_reduced_but_not_gathered(hvd):
    assert hvd.allreduce(torch.tensor(2.0), op=hvd.Sum).item() == 2 * hvd.size()
    with pytest.raises(IndexError, match="without dimensions"):
        hvd.allgather(torch.tensor(1.0))
    with pytest.raises(hvd.HorovodInternalError, match="rank-zero tensor"):
        hvd.reducescatter(torch.tensor(1.0))


def check_reducescatter_refuses_operations_other_than_average_and_sum(hvd):
    with pytest.raises(hvd.HorovodInternalError, match="currently only supports AVERAGE and SUM"):
        hvd.reducescatter(torch.ones(4), op=hvd.Max)


def check_process_sets_are_created_used_and_removed(hvd):
    size, rank = hvd.size(), hvd.rank()
    assert hvd.global_process_set.process_set_id == 0
    assert hvd.global_process_set.rank() == rank
    assert hvd.remove_process_set(hvd.global_process_set) is False
    with pytest.raises(ValueError, match=r"are process set .* already"):
        hvd.add_process_set(list(range(size)))
    with pytest.raises(ValueError, match=f"from 0 to {size - 1}"):
        hvd.add_process_set([size])
    if size == 1:
        return
    with pytest.raises(hvd.HorovodInternalError, match=r"Mismatched PROCESS_SET ranks"):
        hvd.add_process_set([rank])
    ranks = [size - 1, 0] if size > 2 else [1]
    made = hvd.add_process_set(hvd.ProcessSet(ranks))
    assert made.ranks == sorted(ranks)
    assert made.size() == len(ranks)
    assert made.included() == (rank in ranks)
    if rank in ranks:
        assert made.rank() == made.ranks.index(rank)
        given = torch.tensor([float(rank)])
        # Two process sets use the same operation name at the same time.
        whole = hvd.allreduce_async(given, name="both", op=hvd.Sum)
        part = hvd.allreduce_async(given, name="both", op=hvd.Sum, process_set=made)
        assert hvd.synchronize(part).item() == sum(ranks)
        # Ranks outside the process set contribute zeros to the sum over all ranks.
        assert hvd.synchronize(whole).item() == sum(ranks)
        assert hvd.allreduce(given, process_set=made).item() == sum(ranks) / len(ranks)
        # `root_rank` is a rank of the world, not a rank within the process set.
        assert hvd.broadcast(given, size - 1, process_set=made).item() == size - 1
        assert hvd.allgather(given, process_set=made).tolist() == [float(r) for r in sorted(ranks)]
        assert hvd.broadcast_object(rank if rank == size - 1 else None, size - 1, process_set=made) == size - 1
        assert hvd.allgather_object(rank, process_set=made) == sorted(ranks)
        hvd.barrier(process_set=made)
    else:
        hvd.allreduce(torch.zeros(1), name="both", op=hvd.Sum)
        with pytest.raises(ValueError, match="is not a member of the provided process set"):
            hvd.allreduce(torch.ones(1), process_set=made)
    # Ranks have called different numbers of unnamed operations. Even so, the unnamed operations over all ranks match each other.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    assert hvd.remove_process_set(made) is True
    assert (made.process_set_id, made.size(), made.rank()) == (None, None, None)
    with pytest.raises(ValueError, match="not registered"):
        hvd.allreduce(torch.ones(1), process_set=made)


def check_joined_ranks_contribute_zeros_to_averages_over_all_ranks(hvd):
    size, rank = hvd.size(), hvd.rank()
    for batch in range(rank + 1):
        result = hvd.allreduce(torch.ones(2), name=f"batch.{batch}")
        assert torch.allclose(result, torch.full((2,), (size - batch) / size))
    last = hvd.join()
    assert hvd.allgather_object(last) == [last] * size
    assert last in range(size)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def check_allgather_is_refused_while_a_rank_has_joined(hvd):
    if (hvd.size() > 1 and hvd.rank() == 0) or (hvd.size() > 2 and hvd.rank() > 1):
        with pytest.raises(hvd.HorovodInternalError, match="is not supported with Join at this time"):
            hvd.allgather(torch.ones(1), name="joined")
    hvd.join()


def sparse_allreduce(hvd, tensor):
    reduced = hvd.sparse_allreduce_async(tensor, None, hvd.Average)
    return reduced()


def check_every_operation_finishes_or_raises_while_a_rank_has_joined(hvd):
    """Regression: after a join, a rank that had made more unnamed calls than the other ranks kept another count
    forever. So its next unnamed calls had other names than the calls of the other ranks."""
    size, rank = hvd.size(), hvd.rank()
    ones = torch.ones(size)
    refused = [
        lambda: hvd.allgather(ones),
        lambda: hvd.grouped_allgather([ones, ones]),
        lambda: hvd.broadcast(ones, size - 1),
        lambda: hvd.alltoall(ones),
        lambda: hvd.reducescatter(ones),
        lambda: hvd.grouped_reducescatter([ones, ones]),
        lambda: sparse_allreduce(hvd, torch.eye(2).to_sparse()),
        lambda: hvd.allgather_object(rank),
        lambda: hvd.broadcast_object(rank),
    ]
    for joins_first in (0, size - 1):
        if rank != joins_first:
            for call in refused:
                with pytest.raises(hvd.HorovodInternalError, match="is not supported with Join at this time"):
                    call()
            assert hvd.allreduce(ones, op=hvd.Sum).tolist() == [size - 1] * size
            hvd.barrier()
            if hvd.size() > 1:
                with pytest.raises(hvd.HorovodInternalError, match="is not supported with Join"):
                    hvd.add_process_set([0, 1])
        hvd.join()
        # After the join, all ranks count unnamed operations from the same number.
        assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(size))
        assert hvd.alltoall(torch.arange(size)).tolist() == [rank] * size
        assert hvd.broadcast(torch.tensor(rank), size - 1).item() == size - 1
        assert hvd.reducescatter(ones, op=hvd.Sum).tolist() == [size]
        assert hvd.allreduce(ones, op=hvd.Sum)[0] == size
        assert hvd.grouped_allreduce([ones], op=hvd.Sum)[0][0] == size
        assert hvd.allgather_object(rank) == list(range(size))
        hvd.barrier()
        if size > 2:
            hvd.remove_process_set(hvd.add_process_set([0, 1]))


def check_unknown_handle_is_refused_by_poll_and_ignored_by_synchronize(hvd):
    assert hvd.synchronize(99999) is None
    with pytest.raises(ValueError, match="Handle 99999 was not created or has been cleared"):
        hvd.poll(99999)
    handle = hvd.allreduce_async(torch.ones(1))
    assert isinstance(handle, int)
    hvd.synchronize(handle)
    assert hvd.synchronize(handle) is None
    with pytest.raises(ValueError, match="has been cleared"):
        hvd.poll(handle)


def check_poll_returns_true_once_the_result_is_available(hvd):
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="polled")
        assert hvd.size() == 1 or not hvd.poll(handle)
    hvd.barrier()
    if hvd.rank() != 0:
        handle = hvd.allreduce_async(torch.ones(1), name="polled")
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle).item() == 1


def check_grouped_operation_without_tensors_is_refused(hvd):
    for call in (hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allgather, hvd.grouped_reducescatter):
        with pytest.raises(ValueError, match="at least one tensor"):
            call([])


def check_adasum_refuses_a_process_set(hvd):
    if hvd.size() == 2:
        made = hvd.add_process_set([0])
        if hvd.rank() == 0:
            with pytest.raises(NotImplementedError, match="all ranks"):
                hvd.allreduce(torch.ones(1), op=hvd.Adasum, process_set=made)
        hvd.remove_process_set(made)


def check_rank_size_and_build_functions_return_those_of_the_world(hvd):
    assert hvd.is_initialized()
    assert 0 <= hvd.rank() < hvd.size()
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.mpi_built()
    over_gloo = "MASTER_PORT" in os.environ
    assert hvd.gloo_built()
    assert (hvd.mpi_enabled(), hvd.gloo_enabled()) == (not over_gloo, over_gloo)
    if over_gloo:
        with pytest.raises(ValueError, match="don't use MPI"):
            hvd.mpi_threads_supported()
    else:
        assert hvd.mpi_threads_supported()
    assert bool(hvd.nccl_built()) == hvd.cuda_built() == (torch.version.cuda is not None)
    assert not any(built() for built in (hvd.ddl_built, hvd.ccl_built, hvd.rocm_built))
    from horovod.torch.mpi_ops import is_homogeneous

    assert is_homogeneous()


def check_timeline_is_written_as_a_chrome_trace_by_rank_0(hvd):
    import json
    import tempfile
    from pathlib import Path

    with pytest.raises(ValueError, match="HOROVOD_TIMELINE=DYNAMIC"):
        hvd.start_timeline("never.json")
    with tempfile.TemporaryDirectory() as folder, dynamic_timeline():
        path = Path(folder) / "trace.json"
        # Regression: a second call of start_timeline raised a ValueError on rank 0.
        hvd.start_timeline(str(Path(folder) / "before.json"))
        hvd.start_timeline(str(path), mark_cycles=True)
        hvd.allreduce(torch.ones(2), name='a "name"')
        hvd.stop_timeline()
        hvd.stop_timeline()
        assert path.exists() == (hvd.rank() == 0)
        if hvd.rank() == 0:
            events = json.loads(path.read_text())
            drawn = [(e["name"], e["ph"]) for e in events if e.get("ph") in ("B", "E")]
            phases = ("NEGOTIATE_ALLREDUCE", "ALLREDUCE")
            assert drawn == [(name, ph) for name in phases for ph in "BE"]
            # The timeline shows the arrival of each rank's request.
            assert sorted(int(e["name"]) for e in events if e.get("ph") == "X") == list(range(hvd.size()))
            times = [e["ts"] for e in events if e.get("ph") in ("B", "E")]
            assert times == sorted(times)
            assert any(e.get("args", {}).get("name") == 'allreduce.a "name"' for e in events)
            assert any(e.get("name") == "CYCLE_START" for e in events)
        hvd.allreduce(torch.ones(2))


@contextlib.contextmanager
def dynamic_timeline():
    os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    try:
        yield
    finally:
        del os.environ["HOROVOD_TIMELINE"]


def check_child_process_of_a_rank_cannot_initialize_horovod(hvd):
    import subprocess
    import sys

    code = "from paceline.compat.horovod.common import basics; basics.init()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=180)
    refused = "a child of the rank in process" in done.stderr and "__name__ == '__main__'" in done.stderr
    assert refused == (hvd.size() > 1), done.stderr


def check_forked_child_can_read_its_rank_but_not_call_collectives(hvd):
    # Regression: in a DataLoader worker, hvd.rank() raised an error that asked for hvd.init(). A collective in a forked
    # child used the MPI connection of its parent, and the parent crashed when it ended.
    rank, size = hvd.rank(), hvd.size()
    child = os.fork()
    if child == 0:
        told = 1
        try:
            assert (hvd.is_initialized(), hvd.rank(), hvd.size()) == (True, rank, size)
            try:
                hvd.allreduce(torch.ones(1))
            except hvd.HorovodInternalError as error:
                told = 2 if f"was forked from rank {rank}" in str(error) else 0
            hvd.shutdown()
            if size > 1:
                hvd.init()
        except RuntimeError as error:
            told += "a child of the rank in process" in str(error)
        finally:
            os._exit(told)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (3 if size > 1 else 2)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def check_horovod_can_be_shut_down_and_initialized_again(hvd):
    for _ in range(5):
        hvd.shutdown()
        assert not hvd.is_initialized()
        for call in (hvd.rank, hvd.size, lambda: hvd.allreduce(torch.ones(1)), hvd.join):
            with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd.init\(\)"):
                call()
        hvd.init()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    with pytest.raises(ValueError, match="HOROVOD_DYNAMIC_PROCESS_SETS=1"):
        hvd.add_process_set([0])
    hvd.shutdown()
    with pytest.raises(ValueError, match="takes all of them"):
        hvd.init(comm=[hvd_size_plus_one])
    fixed = hvd.ProcessSet([0])
    size = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "1")
    hvd.init(process_sets=[] if size == "1" else [fixed])
    assert hvd.size() == 1 or fixed.process_set_id is not None
    hvd.shutdown()
    assert fixed.process_set_id is None
    hvd.init(process_sets="dynamic")


def check_process_set_can_be_created_from_an_mpi_communicator(hvd):
    # Regression: MPI's Split makes several communicators. Paceline mistook them for one process set with different
    # members on each rank.
    if not hvd.mpi_enabled() or hvd.size() < 2:
        return
    from mpi4py import MPI

    size, rank = hvd.size(), hvd.rank()
    hvd.shutdown()
    mine = hvd.ProcessSet(MPI.COMM_WORLD.Split(rank % 2, rank))
    hvd.init(MPI.COMM_WORLD, process_sets=[mine])
    assert (mine.process_set_id, mine.ranks) == (1 + rank % 2, list(range(rank % 2, size, 2)))
    assert hvd.allgather(torch.tensor([rank]), process_set=mine).tolist() == mine.ranks
    hvd.shutdown()
    hvd.init(process_sets="dynamic")


hvd_size_plus_one = 99


def check_integer_as_a_process_set_is_refused(hvd):
    for call in (hvd.allreduce, hvd.allgather, hvd.reducescatter, hvd.alltoall):
        with pytest.raises(ValueError, match="process_set=5 is not a process set"):
            call(torch.ones(2), process_set=5)
