"""Elastic runs on hosts that are cut off and come back."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.runs import states
from paceline.targets.configured import Configured, add
from tests.engines.conformance import SILENCE_S
from tests.engines.elastic import COUNTS, began_at, wait_for_attempt, wait_for_step
from tests.engines.hosts import Hosts
from tests.engines.lab import Lab, wait_for_end
from tests.helpers import wait_until


@pytest.fixture
def gate(ssh_network: Hosts) -> Iterator[Path]:
    """A file that is not there, where all hosts and this machine would see it. In the end, all hosts are up."""
    path = ssh_network.folder / "gate_elastic"
    yield path
    path.unlink(missing_ok=True)
    for name in ssh_network.names:
        if name in ssh_network.up_now:
            ssh_network.heal(name)
        else:
            ssh_network.boot(name)


@pytest.mark.promise("elastic-run-goes-nodes-left")
def test_elastic_run_continues_without_lost_hosts_and_takes_them_back(lab: Lab, ssh_network: Hosts, gate: Path) -> None:
    hosts = ssh_network
    settings = {
        "hosts": list(hosts.names),
        "ssh_config": str(hosts.ssh_config),
        "python": sys.executable,
        "silence_s": SILENCE_S,
    }
    add(lab.workspace_dir, Configured(name="lab", kind="ssh", settings=settings))
    hosts.kill("pa2")  # the run starts with the two other hosts

    run = lab.submit(
        COUNTS,
        arguments=[str(gate)],
        node_count=(1, 3),
        distributed_backend="gloo",
        compute_target="lab",
        elastic_seconds=1,
    )
    assert wait_for_attempt(run, 1, 2).nodes == ("pa0", "pa1")
    wait_for_step(run, 5)
    hosts.cut("pa0")  # rank 0 on this host has the checkpoint

    assert wait_for_attempt(run, 2, 1).nodes == ("pa1",)
    hosts.heal("pa0")
    hosts.boot("pa2")
    third = wait_for_attempt(run, 3, 3)
    assert (third.nodes, third.reason) == (("pa0", "pa1", "pa2"), "more nodes")
    assert 5 <= began_at(run, 2) < began_at(run, 3)
    gate.touch()
    assert wait_for_end(run) == states.COMPLETED
    assert [attempt.cause for attempt in run.record().attempts] == ["node_lost", "resized", None]
    assert run.record().size == "nodes 3 of 1..3"


#: This script trains a small model in float64 on batches of 12 samples with any number of workers, until the gate file exists. It
#: stores how often each sample was seen in the epoch, and each loss, in the checkpoint. So repeated steps count once.
TRAINS = """
import json, os, sys, time
import torch
import torch.distributed as dist
from paceline import checkpoint
from paceline.data import DistributedSampler

SAMPLES, BATCH = 120, 12
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
generator = torch.Generator().manual_seed(0)
x = torch.randn(SAMPLES, 6, dtype=torch.float64, generator=generator)
y = x.sum(1, keepdim=True).sin()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
sampler = DistributedSampler(SAMPLES, seed=1)
state = {"model": model, "optimizer": optimizer, "sampler": sampler, "seen": torch.zeros(SAMPLES), "losses": []}
step = 0
if found := checkpoint.latest():
    found.load_into(state)
    step = found.step
print("attempt", os.environ["PACELINE_ATTEMPT"], "from", step, flush=True)
is_over = torch.zeros(1)
while not is_over:
    sampler.set_epoch(sampler.epoch)
    mine = list(sampler)
    for start in range(0, len(mine), BATCH // size):
        ids = torch.tensor(mine[start : start + BATCH // size])
        loss = (model(x[ids]) - y[ids]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size
        optimizer.step()
        whole = loss.detach() / size
        dist.all_reduce(whole)
        everybody = [torch.zeros_like(ids) for _ in range(size)]
        dist.all_gather(everybody, ids)
        state["seen"][torch.cat(everybody)] += 1
        state["losses"].append(float(whole))
        sampler.advance(len(ids))
        step += 1
        time.sleep(0.02)
        is_over += rank == 0 and os.path.exists(sys.argv[1])
        dist.all_reduce(is_over)
        if step % (SAMPLES // BATCH) == 0:
            assert (state["seen"] == 1).all(), state["seen"]
            state["seen"].zero_()
            sampler.set_epoch(sampler.epoch + 1)
        checkpoint.save(state, step, every=25)
        if is_over:
            break
if rank == 0:
    json.dump(state["losses"], open("outputs/losses.json", "w"))
"""
#: The number of hosts that the test kills. `make proof` sets PACELINE_LOSSES to 100.
LOSSES = int(os.environ.get("PACELINE_LOSSES", "4"))


@pytest.mark.promise("hundred-losses-returns-hosts-change")
@pytest.mark.proof
@pytest.mark.timeout(4 * 3600)
def test_hundred_host_losses_change_neither_loss_nor_samples(
    lab: Lab, ssh_network: Hosts, gate: Path, tmp_path: Path
) -> None:
    seed = int(time.time())
    print(f"seed {seed}")
    choose, hosts = random.Random(seed), ssh_network
    settings = {
        "hosts": list(hosts.names),
        "ssh_config": str(hosts.ssh_config),
        "python": sys.executable,
        "silence_s": 5,
    }
    add(lab.workspace_dir, Configured(name="lab", kind="ssh", settings=settings))
    run = lab.submit(
        TRAINS,
        arguments=[str(gate)],
        node_count=(1, 3),
        distributed_backend="gloo",
        compute_target="lab",
        elastic_seconds=1,
        grace_period_seconds=2,
        environment_variables={"OMP_NUM_THREADS": "1"},
    )

    def has(count: int) -> list[str]:
        """The nodes of the attempt, once there are so many and all have begun."""

        def trains() -> bool:
            record = run.record()
            assert not record.is_terminal, record.failure
            return record.status == states.RUNNING and len(record.attempts[-1].nodes) >= count

        wait_until(trains, f"it trains on {count} nodes", 120)
        return list(run.record().attempts[-1].nodes)

    def newest() -> int:
        names = [
            path.name.removeprefix("checkpoint_") for path in run.folder.checkpoints.glob("checkpoint_*.safetensors")
        ]
        return max((int(name.partition(".")[0]) for name in names), default=0)

    lost = kept = 0
    while lost < LOSSES:
        away: list[str] = []
        # Wait for a new checkpoint, so that the training makes progress between two lost hosts.
        wait_until(lambda kept=kept: newest() >= kept + 25, "a further checkpoint has come home", 120)  # type: ignore[misc]
        kept = newest()
        for _ in range(choose.randint(1, 2)):
            # Any host may be killed, even the first one, which has the newest checkpoint that the other hosts need.
            there = [name for name in has(1 if away else 2) if name not in away]
            if len(there) < 2 or lost == LOSSES:
                break
            away.append(choose.choice(there))
            (hosts.cut if choose.random() < 0.5 else hosts.kill)(away[-1])
            lost += 1
            time.sleep(choose.random() * 12)
        for name in away:
            if name in hosts.up_now:
                hosts.heal(name)
            else:
                hosts.boot(name)
            time.sleep(choose.random() * 8)
    has(2)
    gate.touch()
    assert wait_for_end(run) == states.COMPLETED, run.failure

    losses = json.loads((run.folder.outputs / "losses.json").read_text())
    # Run as many steps on one worker without any loss, for comparison.
    alone = tmp_path / "alone"
    alone.mkdir()
    script = (
        TRAINS.replace("is_over += rank == 0 and os.path.exists(sys.argv[1])", f"is_over += step >= {len(losses)}")
        .replace("time.sleep(0.02)", "pass")
        .replace("checkpoint.save(state, step, every=25)", "pass")
        .replace('"outputs/losses.json"', "sys.argv[1]")
        .replace('os.environ["PACELINE_ATTEMPT"]', "0")
    )
    (alone / "train.py").write_text(script)
    world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    subprocess.run(
        [sys.executable, "train.py", "losses.json"], cwd=alone, env={**os.environ, **world}, check=True, timeout=600
    )
    expected = json.loads((alone / "losses.json").read_text())
    assert len(losses) == len(expected) > 25
    assert max(abs(one - other) for one, other in zip(losses, expected, strict=True)) < 1e-10
    causes = [attempt.cause for attempt in run.record().attempts]
    assert causes.count("node_lost") >= lost / 3
    # If several hosts return at the same time, the run changes its size only once. With few losses, there may be only
    # one such change.
    assert causes.count("resized") >= (lost / 3 if lost >= 100 else 1)
