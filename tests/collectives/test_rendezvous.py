"""How ranks find each other without MPI, and that a script's own process group does not come in the way."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.collectives import CollectivesError, rendezvous
from tests.collectives.gloo_world import ROOT, Ranks, free_port
from tests.engines.conftest import require_engine

#: The script's own group, made where `order` says; both are used in turn.
BESIDE = """
import sys, numpy, torch, torch.distributed as dist
from paceline import collectives

def own():
    dist.init_process_group("gloo")

def ours():
    collectives.start()

steps = {"before": [own, ours], "after": [ours, own]}[sys.argv[1]]
for step in steps:
    step()
engine = collectives.current()
assert engine.transport_name == "gloo"
for _ in range(3):
    t = torch.ones(3)
    dist.all_reduce(t)
    assert t[0] == engine.size
    assert engine.allreduce("a", numpy.ones(3)).wait(30)[0] == engine.size
if sys.argv[2] == "destroy":
    dist.destroy_process_group()
    assert engine.allreduce("b", numpy.ones(3)).wait(30)[0] == engine.size
    collectives.stop()
    # The store is still there for another start, though the group that may have made it is gone.
    engine = collectives.start()
    assert engine.allreduce("b", numpy.ones(3)).wait(30)[0] == engine.size
collectives.stop()
print("ok", flush=True)
"""


@pytest.mark.parametrize(("order", "end"), [("before", "destroy"), ("after", "destroy"), ("after", "keep")])
def test_a_script_may_have_a_process_group_of_its_own(order, end, tmp_path):
    script = tmp_path / "beside.py"
    script.write_text(BESIDE)
    world = Ranks(2, script, order, end, cwd=tmp_path).wait()
    assert world.codes == [0, 0], world.told()


@pytest.mark.proof
def test_below_torchrun_the_agents_store_is_used(tmp_path):
    require_engine("torch", importlib.util.find_spec("torch"))
    script = tmp_path / "beside.py"
    script.write_text(BESIDE)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PACELINE_", "OMPI_"))}
    options = ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, str(script), "after", "keep"],
        cwd=tmp_path,
        env=clean | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("ok") == 2


def test_a_rank_that_does_not_come_is_named(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(
        "import os, sys\nfrom paceline import collectives\n"
        "if os.environ['RANK'] == '1': sys.exit()\n"
        "try: collectives.start()\nexcept collectives.CollectivesError as error: print('told:', error)\n"
    )
    world = Ranks(3, script, cwd=tmp_path, HOROVOD_GLOO_TIMEOUT_SECONDS="8").wait()
    assert "told: rank 1 of 3 ranks did not call hvd.init() within 8 s of rank 0" in world.outputs[0], world.told()


def test_a_port_that_another_program_has_is_named(tmp_path):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        script = tmp_path / "taken.py"
        script.write_text(
            "from paceline import collectives\n"
            "try: collectives.start()\nexcept collectives.CollectivesError as error: print('told:', error)\n"
        )
        world = Ranks(1, script, cwd=tmp_path, MASTER_PORT=port, WORLD_SIZE="2").wait()
    assert f"told: rank 0 can't reach the store at MASTER_ADDR=127.0.0.1, MASTER_PORT={port}" in world.outputs[0]


def test_a_missing_variable_is_named_with_those_that_are_there():
    with pytest.raises(CollectivesError, match="RANK='0', WORLD_SIZE='2', MASTER_ADDR missing, MASTER_PORT='x'"):
        rendezvous.place({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "x"})


def test_every_operation_gives_what_numpy_gives_over_gloo(tmp_path):
    # Two ranks over Gloo carry out Horovod's checks (tests/compat/horovod/test_on_gloo.py).
    world = Ranks(3, Path(__file__).with_name("engine_checks.py"), cwd=tmp_path).wait()
    assert world.codes == [0] * 3, world.told()
