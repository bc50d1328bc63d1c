"""What `make gpu` runs: parallel training on one GPU, held against one plain process on it. Without a GPU the same on the CPU.

    python benchmarks/gpu.py

    one worker, and two on one device, NCCL                every strategy that so many workers can have
    float64, float32 under bf16's autocast                 loss and parameters after three steps of AdamW
    memory                                                 what the device has given out at most, against the forecast
    the examples                                           a convolutional network and a transformer

Figures go to `results/gpu.json` where there is a GPU, and only to the screen where there is none.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import report

ROOT = Path(__file__).parents[1]
WORDS, ROWS, STEPS = 128, 8, 3
#: Width, depth and length of the sequences, on a CPU and on a GPU, whose memory has to be more than its libraries' own buffers.
SIZES = {"cpu": (256, 4, 32), "cuda": (512, 8, 128)}
#: Largest difference of a parameter, of which the largest is about 1.
LIMITS = {"float64": 1e-9, "bf16": 5e-2}
#: What `parallelize` takes where there are GPUs.
NCCL = "cpu:gloo,cuda:nccl"


def main() -> int:
    import torch

    has_gpu = torch.cuda.is_available()
    begin = time.monotonic()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="paceline-gpu-") as name:
        worlds = ((1, NCCL), (2, NCCL)) if has_gpu else ((1, "gloo"), (2, "gloo"))
        for number, (size, backend) in enumerate(worlds):
            found += _started(size, backend, Path(name) / f"{number}.json")
        examples = {path.name: _example(path) for path in sorted((ROOT / "examples/parallel").glob("*_parallel.py"))}
    for one in found:
        memory = "" if one["memory"] is None else f", memory {one['memory']:.2f} of the forecast"
        print(f"{'equal ' if one['equal'] else 'WRONG '} {one['case']}: {one['apart']:.1e}{memory}")
    for name, seconds in examples.items():
        print(f"{'ran   ' if seconds >= 0 else 'FAILED'} {name}: {seconds:.1f} s")
    memories = [one["memory"] for one in found if one["memory"] is not None]
    met = all(one["equal"] for one in found) and all(seconds >= 0 for seconds in examples.values())
    met = met and all(abs(memory - 1) <= 0.1 for memory in memories)
    if not has_gpu:
        print("torch sees no GPU here: this was the CPU, without memory, and nothing is kept.")
        return 0 if met else 1
    report(
        "gpu",
        "parallel training on one GPU: every strategy against one process, memory against the forecast, the examples",
        "equal, within 10 % of the forecast, in at most 600 s",
        met and time.monotonic() - begin <= 600,
        seconds=time.monotonic() - begin,
        device=torch.cuda.get_device_name(),
        cases=found,
        examples=examples,
    )
    return 0 if met else 1


def _started(size: int, backend: str, path: Path) -> list[dict[str, Any]]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": str(ROOT / "src"),
        **({"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"} if size > 1 else {}),
    }
    command = [sys.executable, str(Path(__file__).resolve()), "--rank", backend, str(path)]
    ranks = [
        # NCCL refuses two ranks of one machine on one GPU: it is told of two machines, and goes through sockets.
        subprocess.Popen(
            command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_HOSTID": f"host{rank}"}
        )
        for rank in range(size)
    ]
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"workers of {size} over {backend} have ended with {codes}; their own words are above.")
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def _example(path: Path) -> float:
    """Seconds, or -1 where it failed."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        ended = subprocess.run([sys.executable, str(path)], cwd=folder, env=environment, check=False)
    return time.monotonic() - begin if ended.returncode == 0 else -1.0


def on_a_rank(backend: str, path: str) -> None:
    import torch
    import torch.distributed as dist

    from paceline.parallel import (
        ContextParallel,
        DataParallel,
        ExpertParallel,
        FullyShard,
        PipelineParallel,
        TensorParallel,
    )

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_num_threads(1)
    dist.init_process_group(backend)
    size = dist.get_world_size()
    found = []
    for strategy in (
        *(DataParallel(), FullyShard(), PipelineParallel(), TensorParallel()),
        *((ContextParallel(), ExpertParallel()) if size > 1 else ()),
    ):
        for kind, limit in LIMITS.items():
            apart, memory = _case(strategy, kind, size, device)
            case = f"{type(strategy).__name__}({size}) over {backend}, {kind}"
            print(f"rank {dist.get_rank()}: {case}", flush=True)
            found.append({"case": case, "apart": apart, "equal": apart <= limit, "memory": memory})
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _case(strategy: Any, kind: str, size: int, device: Any) -> tuple[float, float | None]:
    """The largest difference of a parameter, and the memory that was taken as a part of the forecast."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    import paceline

    def loss(output: Any, target: Any) -> Any:
        return cross_entropy(output.flatten(0, 1), target.flatten())

    torch.manual_seed(0)
    dtype = torch.float64 if kind == "float64" else torch.float32
    plain = _model(*SIZES[device.type][:2], has_experts=type(strategy).__name__ == "ExpertParallel").to(device, dtype)
    model = copy.deepcopy(plain)
    micro = 2 if type(strategy).__name__ == "PipelineParallel" else 1
    x, y = torch.randint(0, WORDS, (2, ROWS, SIZES[device.type][2]))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for some, of in zip(x.to(device).chunk(micro), y.to(device).chunk(micro), strict=True):
            with torch.autocast(device.type, torch.bfloat16, enabled=kind == "bf16"):
                part = loss(plain(some), of) / micro
            part.backward()
        optimizer.step()
    expected = {name: value.cpu() for name, value in plain.state_dict().items()}
    del plain, optimizer, part
    # What is still held then is not this case's: buffers of the libraries, and the model itself.
    gc.collect()
    own = sum(param.nbytes for param in model.parameters())
    before = torch.cuda.memory_allocated(device) - own if device.type == "cuda" else 0
    par = paceline.parallelize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss=loss,
        strategy=strategy,
        microbatches=micro,
        sample=(x, y),
        device=device,
        precision="bf16" if kind == "bf16" else None,
    )
    par.step((x, y))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(STEPS - 1):
        par.step((x, y))
    # The forecast is of the worker that has the most.
    everyone = [0] * size
    dist.all_gather_object(everyone, torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0)
    taken = max(everyone)
    text = par.explain()
    found = par.full_state_dict()
    apart = max(float((found[name] - value).abs().max()) for name, value in expected.items())
    planned = text.forecasts[text.chosen].memory_bytes if size > 1 else 0
    return apart, taken / planned if taken and planned else None


def _model(width: int, depth: int, *, has_experts: bool) -> Any:
    import torch
    from torch import nn
    from torch.nn.functional import gelu, scaled_dot_product_attention

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(width, 4)
            self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

        def forward(self, x: Any) -> Any:
            gates = self.router(x).softmax(-1)
            return sum(gates[..., [number]] * expert(x) for number, expert in enumerate(self.experts))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
            self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
            self.out, self.up, self.down = (
                nn.Linear(width, width),
                nn.Linear(width, 4 * width),
                nn.Linear(4 * width, width),
            )
            self.heads, self.mixture = 4, Mixture() if has_experts else None

        def forward(self, x: Any) -> Any:
            h = self.before(x)
            q, k, v = (part(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
            x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            x = x if self.mixture is None else x + self.mixture(x)
            return x + self.down(gelu(self.up(self.after(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, width)
            self.blocks = nn.ModuleList(Block() for _ in range(depth))
            self.head = nn.Linear(width, WORDS)

        def forward(self, x: Any) -> Any:
            x = self.words(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    return Model()


if __name__ == "__main__":
    if "--rank" in sys.argv:
        on_a_rank(*sys.argv[2:])
    else:
        sys.exit(main())
