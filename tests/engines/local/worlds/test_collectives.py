"""Workers that really talk to each other: mpi4py over each Open MPI, torch's Gloo under each launcher."""

from __future__ import annotations

import paceline as pl
from paceline.runs import states
from tests.engines.conftest import require_module
from tests.engines.lab import Lab, log_text

SUM_BY_MPI_AND_BREAK = """
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    print(f"rank {world.rank} of {world.size}: {world.allreduce(10 ** world.rank)}", flush=True)
    if world.rank == 1:
        raise ValueError("bad batch")
    world.allreduce(1)
"""

SUM_BY_GLOO = """
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(value)
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {value.item():g}")
    dist.destroy_process_group()
"""

#: In this script, both ranks average the gradient of w * x: x is 1 on rank 0 and 3 on rank 1. Then rank 0 fails. It
#: closes its connections before it reports its exception, so rank 1 fails before that report.
MEAN_OF_GRADIENTS_AND_BREAK = """
    import contextlib, os, socket, time
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    model(torch.tensor([[1.0 + 2.0 * dist.get_rank()]])).sum().backward()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {model.module.weight.grad.item()}")
    if dist.get_rank() == 0:
        for fd in range(3, 256):
            with contextlib.suppress(OSError):
                connection = socket.socket(fileno=os.dup(fd))
                if connection.getpeername():  # one that only listens has none
                    connection.shutdown(socket.SHUT_RDWR)
        while not os.path.exists(os.path.join(os.environ["PACELINE_RUN_DIR"], "attempts/1/error_1.json")):
            time.sleep(0.01)
        raise ValueError("bad batch")
    dist.all_reduce(torch.ones(1))
"""


def test_mpi4py_sums_over_two_workers_and_a_raising_rank_ends_the_other(lab: Lab, mpirun: str) -> None:
    # Without Paceline this script would hang: rank 1 waits in MPI_Finalize, and rank 0 waits for rank 1 in the second sum.
    require_module("mpi4py")
    run = lab.finish(SUM_BY_MPI_AND_BREAK, node_count=2, distributed_backend="mpi", grace_period_seconds=1)

    assert [log_text(run, rank).splitlines()[0] for rank in range(2)] == ["rank 0 of 2: 11", "rank 1 of 2: 11"]
    assert run.status == states.FAILED
    assert run.failure is not None
    assert (run.failure.rank, run.failure.cause, run.failure.exit_code) == (1, "exception", 1)
    assert run.failure.exception == "ValueError: bad batch"
    assert [rank for rank, _ in run.failure.victims] == [0]


def test_torch_gloo_all_reduce_works_on_two_workers_of_mpirun(lab: Lab, any_mpirun: str, torch_at_hand: None) -> None:
    run = lab.complete(SUM_BY_GLOO, estimator=pl.PyTorch, node_count=2, distributed_backend="mpi")

    assert [log_text(run, rank).splitlines()[-1] for rank in range(2)] == ["rank 0 of 2: 11", "rank 1 of 2: 11"]


def test_failure_report_names_the_rank_that_raised_and_not_the_rank_whose_torch_collective_failed(
    lab: Lab, torch_at_hand: None
) -> None:
    run = lab.finish(MEAN_OF_GRADIENTS_AND_BREAK, estimator=pl.PyTorch, node_count=2, distributed_backend="gloo")

    # Before the failure, both ranks averaged their gradients.
    assert [f"rank {rank} of 2: 2.0" in log_text(run, rank).splitlines() for rank in range(2)] == [True, True]
    report = run.failure
    assert report is not None
    assert (report.rank, report.node, report.exception) == (0, "local-0", "ValueError: bad batch")
    assert "failed first" in report.message
    ((victim, what),) = report.victims
    assert victim == 1
    assert what.startswith("lost its connection to a worker that was gone: ")
    assert "Connection closed by peer" in what or "Connection reset by peer" in what
