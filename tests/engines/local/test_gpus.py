"""GPUs, as far as a machine without one can test: each rank's devices, and refused requests."""

from __future__ import annotations

from typing import Any

import pytest

import paceline as pl
from paceline.observe.node.gpus import GPUS_VARIABLE
from tests.engines.lab import KEEP, Lab, seen, wait_for_end

LOOK = KEEP + "keep(os.environ['CUDA_VISIBLE_DEVICES'])\n"


@pytest.fixture(autouse=True)
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GPUS_VARIABLE, "0,1,GPU-5f,3")


@pytest.fixture(params=["gloo", "mpi"])
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.param == "mpi":
        request.getfixturevalue("any_mpirun")
    return {"distributed_backend": request.param, "use_gpu": True}


@pytest.mark.promise("runs-share-cores-gpus-order")
@pytest.mark.parametrize("nodes", [1, 2])
def test_each_worker_sees_only_its_own_gpu_by_default(lab: Lab, backend: dict[str, Any], nodes: int) -> None:
    run = lab.complete(LOOK, node_count=nodes, process_count_per_node=4 // nodes, **backend)
    assert [seen(run, rank) for rank in range(4)] == ["0", "1", "GPU-5f", "3"]


def test_each_worker_sees_all_gpus_of_its_node_if_gpu_visibility_is_node(lab: Lab, backend: dict[str, Any]) -> None:
    run = lab.complete(LOOK, node_count=2, process_count_per_node=2, gpu_visibility="node", **backend)
    assert [seen(run, rank) for rank in range(4)] == ["0,1", "0,1", "GPU-5f,3", "GPU-5f,3"]


@pytest.mark.promise("runs-ask-share-gpu-same")
def test_runs_use_one_gpu_at_the_same_time_while_their_gpu_share_values_sum_to_at_most_1(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPUS_VARIABLE, "GPU-5f")
    # Each run waits until both runs have started, so both must run at the same time.
    script = LOOK + (
        "import time\n"
        "open(f'{sys.argv[1]}/{os.environ[\"PACELINE_RUN_ID\"]}', 'w').close()\n"
        "while len(os.listdir(sys.argv[1])) < 2: time.sleep(0.02)\n"
    )
    met = lab.folder / "met"
    met.mkdir()
    runs = [lab.submit(script, use_gpu=True, gpu_share=0.5, arguments=[str(met)]) for _ in range(2)]
    third = lab.submit(script, use_gpu=True, gpu_share=0.6, arguments=[str(met)])
    assert [wait_for_end(run) for run in (*runs, third)] == ["Completed"] * 3
    assert [seen(run) for run in (*runs, third)] == ["GPU-5f"] * 3
    # The third run does not fit beside the other two runs, so it has waited until they ended.
    assert third.record().started_utc >= max(run.record().ended_utc for run in runs)


@pytest.mark.promise("machine-lacks-said-submit-before")
def test_more_workers_than_gpus_are_refused_before_anything_starts(lab: Lab) -> None:
    lab.write("print()\n")
    estimator = pl.PyTorch(
        str(lab.source), entry_script="train.py", use_gpu=True, process_count_per_node=5, distributed_backend="nccl"
    )
    with pytest.raises(
        pl.errors.TargetError, match="use_gpu=True with 5 workers, one GPU each, but target 'local' has 4 GPUs"
    ):
        lab.experiment.submit(estimator)


def test_invalid_device_ordinal_failure_suggests_gpu_visibility_node_unless_it_is_set(lab: Lab) -> None:
    script = "raise RuntimeError('CUDA error: invalid device ordinal')\n"
    run = lab.finish(script, use_gpu=True)
    assert run.failure is not None
    assert "gpu_visibility='node'" in run.failure.message
    run = lab.finish(script, use_gpu=True, gpu_visibility="node")
    assert run.failure is not None
    assert "gpu_visibility" not in run.failure.message
