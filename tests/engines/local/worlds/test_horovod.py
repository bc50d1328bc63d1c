"""Horovod's calls and torch's `mpi` backend in real runs, with nothing in the script that knows of Paceline."""

from __future__ import annotations

import pytest

import paceline as pl
from tests.engines.lab import KEEP, Lab, exit_codes, seen

HOROVOD = KEEP + (
    "import torch\n"
    "import horovod.torch as hvd\n"
    "hvd.init()\n"
    "model = torch.nn.Linear(3, 1)\n"
    "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"
    "optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())\n"
    "for step in range(3):\n"
    "    optimizer.zero_grad()\n"
    "    model(torch.full((2, 3), float(hvd.rank() + step))).sum().backward()\n"
    "    optimizer.step()\n"
    "total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum, name='total')\n"
    "keep([hvd.rank(), hvd.size(), hvd.local_rank(), total.item(), model.weight.tolist()])\n"
)
TORCH = KEEP + (
    "import torch, torch.distributed as dist\n"
    "dist.init_process_group('mpi')\n"
    "model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))\n"
    "model(torch.full((2, 3), float(dist.get_rank()))).sum().backward()\n"
    "keep([dist.get_backend(), dist.get_world_size(), model.module.weight.grad.tolist()])\n"
)
ELASTIC = KEEP + (
    "import signal\n"
    "import torch\n"
    "import horovod.torch as hvd\n"
    "hvd.init()\n"
    "@hvd.elastic.run\n"
    "def train(state):\n"
    "    for state.batch in range(state.batch, 50):\n"
    "        if hvd.rank() == 1 and state.batch == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
    "        hvd.allreduce(torch.ones(1), name='step')\n"
    "        state.commit()\n"
    "train(hvd.elastic.TorchState(batch=0))\n"
)
WORLD = {"estimator": pl.PyTorch, "distributed_backend": "mpi", "process_count_per_node": 2}


@pytest.fixture(autouse=True)
def wheel(any_mpirun: str, torch_at_hand: None) -> None:
    """With the Open MPI of the wheel, which mpi4py is built for."""


@pytest.mark.promise("script-written-horovod-runs")
def test_horovod_script_on_two_workers_runs_unchanged(lab: Lab) -> None:
    run = lab.complete(HOROVOD, **WORLD)
    found = [seen(run, rank) for rank in range(2)]
    assert [values[:4] for values in found] == [[0, 2, 0, 1.0], [1, 2, 1, 1.0]]
    assert found[0][4] == found[1][4]


def test_horovod_script_without_a_launcher_runs_as_rank_0_of_1(lab: Lab) -> None:
    run = lab.complete(HOROVOD)
    assert seen(run)[:4] == [0, 1, 0, 0.0]


@pytest.mark.promise("real-horovod-comes-first")
def test_script_imports_horovod_from_its_source_folder_instead_of_pacelines_replacement(lab: Lab) -> None:
    run = lab.complete(KEEP + "import horovod\nkeep(horovod.WHOSE)\n", {"horovod/__init__.py": "WHOSE = 'mine'\n"})
    assert seen(run) == "mine"


def fails(lab: Lab, script: str, end: str, wait: str, code: int) -> pl.Run:
    """The run of the script, of which rank 1 fails in the end, where rank 0 waits for it."""
    run = lab.finish(f"{script}if os.environ['PACELINE_RANK'] == '1': {end}\n{wait}\n", **WORLD)
    assert run.failure is not None
    assert (run.failure.cause, run.failure.rank, run.failure.exit_code) == ("exception", 1, code)
    assert exit_codes(run)["0"] != 0
    return run


def test_failed_rank_of_a_horovod_run_is_named_and_the_other_rank_ends(lab: Lab) -> None:
    fails(lab, HOROVOD, "sys.exit(7)", "hvd.allreduce(torch.ones(1))", 7)


@pytest.mark.promise("torch-backend-mpi-run-dtype")
def test_torch_backend_mpi_runs_collectives_under_mpirun_and_failure_report_names_the_failed_rank(lab: Lab) -> None:
    run = fails(lab, TORCH, "raise ValueError('mine')", "dist.barrier()", 1)
    assert [seen(run, rank) for rank in range(2)] == [["mpi", 2, [[1.0, 1.0, 1.0]]]] * 2


def test_failure_report_names_the_killed_rank_of_an_elastic_horovod_script_and_not_the_other_rank(lab: Lab) -> None:
    """Regression: after rank 1 was killed, rank 0 failed too, because it tried to start the engine again, which MPI
    does not allow. The report blamed rank 0."""
    run = lab.finish(ELASTIC, **WORLD)
    assert run.failure is not None
    assert (run.failure.cause, run.failure.rank, run.failure.signal) == ("killed", 1, "SIGKILL")
    [(victim, what)] = run.failure.victims
    assert victim == 0
    # Rank 0 reports the loss of rank 1 within a quarter of a second. On a busy machine, Paceline may end rank 0 before
    # that.
    assert "rank 1 was lost, and MPI can't go on" in what or what == "was ended by Paceline because of it."


@pytest.mark.promise("restarted-run-s-elastic-state")
def test_restarted_elastic_script_resumes_from_its_last_commit(lab: Lab) -> None:
    """Over Gloo too, though a world over MPI can't be made again in the process that has lost a rank."""
    once = ELASTIC.replace("state.batch == 3:", "state.batch == 3 and os.environ['PACELINE_ATTEMPT'] == '1':")
    begin = "    keep(state.batch)\n"
    run = lab.complete(once.replace("def train(state):\n", f"def train(state):\n{begin}"), max_restarts=1, **WORLD)
    assert [seen(run, rank) for rank in range(2)] == [2, 2]


@pytest.mark.proof
def test_elastic_training_continues_with_fewer_and_more_nodes(lab: Lab) -> None:
    script = (
        KEEP + "import signal, time\n"
        "import torch\n"
        "import horovod.torch as hvd\n"
        "hvd.init()\n"
        "@hvd.elastic.run\n"
        "def train(state):\n"
        "    while len(state.sizes) < 20 or state.sizes[-1] == 1:\n"
        "        hvd.allreduce(torch.ones(1), name='step')\n"
        "        state.sizes = [*state.sizes, hvd.size()]\n"
        "        if os.environ['PACELINE_ATTEMPT'] == '1' and len(state.sizes) == 5 and hvd.rank() == 1:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        time.sleep(0.05)\n"
        "        state.commit()\n"
        "state = hvd.elastic.TorchState(sizes=[])\n"
        "train(state)\n"
        "keep(state.sizes)\n"
    )
    world = {"node_count": (1, 2), "elastic_seconds": 3, "distributed_backend": "gloo", "estimator": pl.PyTorch}
    sizes = seen(lab.complete(script, **world))
    shrunk, grown = sizes.index(1), len(sizes) - sizes[::-1].index(1)
    # Before the kill, the other rank may have committed the batch after the killed rank's last commit.
    assert shrunk in (4, 5)
    assert sizes == [2] * shrunk + [1] * (grown - shrunk) + [2] * (len(sizes) - grown)
    assert len(sizes) > grown
