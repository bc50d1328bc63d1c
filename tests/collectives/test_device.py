"""Tensors that stay on their device, with the CPU and Gloo in the place of a GPU and NCCL; streams are recorded ones."""

from __future__ import annotations

import contextlib

from paceline.collectives import device
from tests.collectives.gloo_world import Ranks

CHECKS = """
import random, torch
from paceline import collectives
engine = collectives.start()
rank, size = engine.rank, engine.size
cases = [(d, op) for d in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool)
         for op in ("sum", "average", "min", "max", "product")]
order = list(range(len(cases)))
random.Random(rank).shuffle(order)
made = {}
for i in order:
    dtype, op = cases[i]
    tensors = [torch.tensor([1.0 + rank, 3.0, rank]).to(dtype), torch.full((2, 2), 2.0).to(dtype).t()]
    outs = [torch.empty_like(t) for t in tensors]
    made[i] = (tensors, outs, engine.device_allreduce(f"c{i}", tensors, outs, op=op))
folds = {"sum": torch.sum, "min": torch.amin, "max": torch.amax, "product": torch.prod}
for i, (tensors, outs, handle) in made.items():
    dtype, op = cases[i]
    handle.wait(60)()
    ranks = torch.stack([torch.tensor([1.0 + r, 3.0, r]).to(dtype).double() for r in range(size)])
    wanted = ranks.sum(0) / size if op == "average" else folds[op](ranks, 0)
    if dtype == torch.bool:
        wanted = ranks.amax(0) if op in ("sum", "max") else ranks.amin(0)
    elif dtype == torch.int64:
        wanted = wanted.trunc()
    torch.testing.assert_close(outs[0].double(), wanted.to(dtype).double(), msg=str(cases[i]))
# In place, scaled, and then a disagreement, after which the engine goes on.
t = torch.tensor([1.0, 2.0])
engine.device_allreduce("p", [t], [t], prescale=2.0, postscale=0.5).wait(60)()
assert t.tolist() == [size, 2.0 * size]
try:
    engine.device_allreduce("m", [torch.ones(2 + rank)], [torch.ones(2 + rank)]).wait(60)
except collectives.MismatchError as error:
    assert "tensor shapes" in str(error)
else:
    raise AssertionError("nothing was raised")
try:
    (engine.device_allreduce("h", [t], [t]) if rank else engine.allreduce("h", t.numpy())).wait(60)
except collectives.MismatchError as error:
    assert "devices" in str(error)
else:
    raise AssertionError("nothing was raised")
number = engine.add_process_set([0, 1])
if rank < 2:
    engine.device_allreduce("s", [t], [t], op="max", process_set=number).wait(60)()
collectives.stop()
print("ok")
"""


def test_device_tensors_are_reduced_on_the_device_in_the_same_order_on_all_ranks(tmp_path):
    script = tmp_path / "checks.py"
    script.write_text(CHECKS)
    world = Ranks(3, script, cwd=tmp_path).wait()
    assert world.codes == [0] * 3, world.told()


HOROVOD = """
import torch
from paceline.compat import install
install("horovod")
import horovod.torch as hvd
from paceline.compat.horovod.torch import allreduce as module
module.stays_on_device = lambda tensors: True
hvd.init()
rank, size = hvd.rank(), hvd.size()
t = torch.full((2, 3), float(rank))
assert hvd.allreduce(t.t(), op=hvd.Sum).tolist() == [[sum(range(size))] * 2] * 3
assert hvd.allreduce_(t, name="t") is t
assert t[0, 0] == (size - 1) / 2
both = hvd.grouped_allreduce([torch.ones(2), torch.ones(1, dtype=torch.int32)], op=hvd.Sum)
assert [b.tolist() for b in both] == [[size] * 2, [size]]
model = torch.nn.Linear(3, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
before = model.weight.detach().clone()
model(torch.full((1, 3), float(rank))).sum().backward()
optimizer.step()
torch.testing.assert_close(before - model.weight.detach(), torch.full((1, 3), (size - 1) / 2))
hvd.shutdown()
"""


def test_horovod_operations_on_device_tensors_reduce_them_on_the_device(tmp_path):
    script = tmp_path / "calls.py"
    script.write_text(HOROVOD)
    world = Ranks(2, script, cwd=tmp_path).wait()
    assert world.codes == [0] * 2, world.told()


class Streams:
    """The used part of `torch.cuda`; it records the order of calls."""

    def __init__(self):
        self.notes = []
        self.now = "caller"
        outer = self

        class Event:
            def record(self, stream):
                outer.notes.append(f"record on {stream.name}")

        class Stream:
            def __init__(self, name="ours", device=None):
                self.name = name

            def wait_event(self, event):
                outer.notes.append(f"{self.name} waits")

        self.Event, self.Stream, self.caller = Event, Stream, Stream("caller")

    def current_stream(self, device=None):
        return self.caller

    @contextlib.contextmanager
    def stream(self, stream):
        self.notes.append("enter ours")
        yield
        self.notes.append("leave ours")


class Group:
    def __init__(self, notes):
        self.notes = notes

    def allreduce(self, tensors, op):
        self.notes.append("allreduce")
        return self

    def wait(self):
        self.notes.append("wait")

    def shutdown(self):
        self.notes.append("shutdown")

    def abort(self):
        self.notes.append("abort")
        raise RuntimeError("it is gone already")


def test_device_reduction_and_callers_stream_wait_for_each_other():
    import torch

    class Tensor(torch.Tensor):
        def record_stream(self, stream):
            streams.notes.append(f"kept for {stream.name}")

    streams = Streams()
    group = device.DeviceGroup(Group(streams.notes), 2, streams)
    tensor = torch.ones(2).as_subclass(Tensor)
    done = group.allreduce([tensor], [tensor], "sum", 1.0, 1.0, streams.Event())
    group.let_wait(done)
    assert streams.notes == [
        *("enter ours", "ours waits", "kept for ours", "kept for ours"),
        *("allreduce", "wait", "record on ours", "leave ours", "caller waits"),
    ]


def test_gpu_process_group_is_aborted_if_it_is_broken_and_shut_down_otherwise():
    notes = []
    group = device.DeviceGroup(Group(notes), 2)
    group.close(broken=False)
    group.close(broken=True)
    assert notes == ["shutdown", "abort"]
