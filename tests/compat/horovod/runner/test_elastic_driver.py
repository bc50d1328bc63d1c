"""`horovodrun` with ranks that are killed and hosts that come, and its parts that can be tested without processes."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from paceline.compat.horovod.runner import elastic_driver
from paceline.compat.horovod.runner.elastic_driver import ElasticDriver, ElasticLimits
from paceline.compat.horovod.runner.hosts import Host
from paceline.compat.horovod.runner.output import Output
from paceline.compat.horovod.runner.ranks import RankEnd, RankOutcome
from paceline.compat.horovod.runner.requested_job import elastic_limits
from paceline.errors import RunFailedError
from tests.compat.horovod.runner.test_launch import environment, run  # noqa: F401
from tests.engines.conftest import require_engine
from tests.helpers import write_program
from tests.warm import below_mpirun

TRAIN = """
import os, signal, time
import torch
import horovod.torch as hvd

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(2, 1, bias=False).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
sampler = hvd.elastic.ElasticSampler(range(40), seed=3)
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, batch=0, seen=[], first=None)

@hvd.elastic.run
def train(state):
    if state.first is None:
        state.first = model.weight.tolist()
    while len(sampler):
        if hvd.rank() == 1 and state.batch == 3 and not os.path.exists("killed"):
            open("killed", "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        parts = hvd.allgather_object(sampler.get_indices(0, 2))
        optimizer.zero_grad()
        model(torch.ones(1, 2).double()).sum().backward()
        optimizer.step()
        sampler.record_batch(0, 2)
        sampler.reset()
        state.seen, state.batch = [*state.seen, *parts], state.batch + 1
        if state.batch == 6 and hvd.size() == 2 and hvd.rank() == 0:
            open("hosts", "w").write("localhost:3")
        while state.batch >= 6 and hvd.size() == 2:
            # Until it is noticed that there is more room; this does not return then.
            state.commit()
            time.sleep(0.05)
        state.commit()

train(state)
if hvd.rank() == 0:
    print([hvd.size(), state.batch, state.seen, state.first, model.weight.tolist()], flush=True)
"""


@pytest.mark.promise("elastic-job-goes-last-commit")
def test_training_result_is_the_same_after_a_killed_rank_and_a_new_host(tmp_path, monkeypatch):
    require_engine("torch", find_spec("torch"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "hosts").write_text("localhost:2")
    write_program(tmp_path / "d.sh", "#!/bin/sh\ncat hosts\n")
    done = run("-np", 2, "--min-np", 2, "--host-discovery-script", "./d.sh", *below_mpirun(3, "train.py"))
    assert done.returncode == 0, done.stderr
    assert "rank 1 on" in done.stderr
    assert "there are other hosts. Going on from the last commit." in done.stderr
    size, batches, parts, first, last = ast.literal_eval(done.stdout.splitlines()[-1].partition(":")[2])
    assert size == 3
    samples = [sample for part in parts for sample in part]
    # The dataset has 40 samples. Two ranks read 24 samples, then three ranks read 12. The last four samples are too few
    # for three equal parts, so some are read twice.
    assert sorted([*samples[:36], *set(samples[36:])]) == list(range(40))
    # The expected weight has one update for each batch. The step in which a rank was killed was repeated, so it counts
    # once.
    weight, velocity = first, 0.0
    for _ in range(batches):
        velocity = 0.9 * velocity + 1.0
        weight = [[value - 0.01 * velocity for value in weight[0]]]
    assert last == [pytest.approx(weight[0], abs=1e-10)]


def test_elastic_job_ends_after_attempts_without_progress(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("--gloo", "-np", 1, "--min-np", 1, "sh", "-c", "echo try; exit 5")
    assert (done.returncode, done.stdout.count("try")) == (5, 3)
    assert "The job ends: it has failed 3 times without a commit in between." in done.stderr
    done = run("--gloo", "-np", 1, "--min-np", 1, "--reset-limit", 1, "sh", "-c", "echo try; exit 5")
    assert (done.returncode, done.stdout.count("try")) == (5, 2)
    assert "The job ends: --reset-limit 1 is reached." in done.stderr


def options(**given):
    names = ("min_np", "max_np", "host_discovery_script", "slots", "elastic_timeout", "reset_limit")
    return SimpleNamespace(**(dict.fromkeys((*names, "blacklist_cooldown_range")) | given))


def test_min_np_defaults_to_np():
    assert elastic_limits(options(), 4) is None
    assert elastic_limits(options(max_np=8), 4) == ElasticLimits(start=4, least=4, most=8)
    limits = elastic_limits(options(min_np=2, elastic_timeout=5.0, reset_limit=3), 4)
    assert limits == ElasticLimits(start=4, least=2, wait_s=5.0, resets=3)


def driver(hosts, **limits):
    watch = SimpleNamespace(usable=lambda: hosts, error=None, out=[])
    watch.failed = watch.out.append
    limits = ElasticLimits(**({"start": 2, "least": 1} | limits))
    return ElasticDriver(lambda slots: None, Output(), watch, limits), watch


def test_too_few_slots_raise_after_the_elastic_timeout():
    made, _ = driver([Host(name="a", slots=1)], start=3, wait_s=0.0)
    with pytest.raises(RunFailedError, match=r"3 slots were not there within --elastic-timeout 0 s; .* are a:1"):
        made.run()


def test_host_change_is_detected_if_more_ranks_fit_or_a_host_is_gone():
    hosts = [Host(name="a", slots=2), Host(name="b", slots=1)]
    made, _ = driver(hosts, most=3)
    slots = elastic_driver.host_lists.slots(hosts, 3)
    assert not made._have_changed(slots)
    hosts[:] = [Host(name="a", slots=9)]
    assert made._have_changed(slots), "b is gone"
    hosts[:] = [Host(name="a", slots=9), Host(name="b", slots=9)]
    assert not made._have_changed(slots), "no more than --max-np"
    assert made._have_changed(slots[:2])
    hosts.clear()
    assert not made._have_changed(slots), "there would be nobody to go on with"


def test_host_of_a_failed_rank_is_excluded_if_it_is_lost_or_the_other_hosts_suffice():
    def outcome(**lost):
        bad = RankEnd(host="b", exit_code=1, ended_at=1.0, connection=object(), **lost)
        return RankOutcome([RankEnd(host="a", exit_code=143, ended_at=2.0, stopped=True, connection=object()), bad])

    for hosts, lost, left_out in (
        ([Host(name="b", slots=2)], {}, []),
        ([Host(name="b", slots=2)], {"is_lost": True}, ["b"]),
        ([Host(name="a", slots=1), Host(name="b", slots=1)], {}, ["b"]),
    ):
        made, watch = driver(hosts)
        made._leave_out(outcome(**lost))
        assert watch.out == left_out


def test_elastic_driver_replaces_a_stored_commit_only_by_a_completely_received_one():
    made, _ = driver([])
    made._commits = {"commit_0.of_before-0.safetensors": b"old", "commit_1.of_before-0.safetensors": b"other"}
    whole, part = "commit_0.of_host.safetensors", "commit_1.of_host.safetensors"
    files = {"result": bytearray(b"none"), whole: bytearray(b"new"), part: bytearray(b"ha")}
    rank = RankEnd(host="a", files=files, sizes={"result": 4, whole: 3, part: 4})
    assert made._take_commits(RankOutcome([rank]))
    assert made._commits == {"commit_0.of_before-0.safetensors": b"new", "commit_1.of_before-0.safetensors": b"other"}
    assert rank.whole_files() == {"result": b"none"}
    assert not made._take_commits(RankOutcome([RankEnd(host="a")]))
