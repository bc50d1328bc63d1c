"""`paceline check`, as a user types it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engines.conftest import require_module
from tests.warm import forking_variables

SCRIPT = """
import torch
import paceline

torch.manual_seed(torch.seed())  # another model in each run: the comparison gives both the same
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
torch.seed()
loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(32, 4))
OPTIMIZER


def loss_of(output, target):
    return LOSS


par = paceline.parallelize(model, optimizer, loader, loss=loss_of, strategy=paceline.STRATEGY, microbatches=2, check="off")
for epoch in range(EPOCHS):
    for batch in par.epoch(epoch):
        par.step(batch)
print("to the end")
"""
#: A model for sequences with blocks of attention and blocks of experts.
SEQUENCES = """
import torch
from torch import nn
from torch.nn import functional
import paceline


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        heads = [part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)]
        found = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return x + self.out(found.transpose(1, 2).flatten(2))


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4), nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])

    def forward(self, x):
        gates, chosen = self.router(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            *place, which = torch.where(chosen == number)
            out = out.index_put(tuple(place), expert(x[tuple(place)]) * gates[(*place, which)][:, None], accumulate=True)
        return out


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(32, 16), nn.Embedding(12, 16)
        self.blocks, self.mixture = nn.ModuleList([Block() for _ in range(2)]), Mixture()
        self.head = nn.Linear(16, 32)

    def forward(self, x):
        x = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x + torch.tanh(self.mixture(x)))


torch.manual_seed(0)
drawn = torch.randint(0, 32, (32, 13))
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(drawn[:, :-1], drawn[:, 1:]), batch_size=8)
model = Model()
par = paceline.parallelize(
    model,
    torch.optim.Adam(model.parameters()),
    loader,
    loss=lambda output, target: functional.cross_entropy(output.flatten(0, 1), target.flatten()),
    strategy=paceline.parallel.STRATEGY,
)
for batch in par.epoch(0):
    par.step(batch)
"""
MEAN = "torch.nn.functional.cross_entropy(output, target)"
ADAM = "optimizer = torch.optim.Adam(model.parameters())"
#: Muon computes parts of its step in bfloat16, but the comparison lets it compute in float64.
MUON = """
optimizer = torch.optim.Muon([param for param in model.parameters() if param.dim() == 2], lr=0.1)
"""
AGAINST_EACH_OTHER = "torch.nn.functional.cross_entropy(output @ output.T, torch.arange(len(output)))"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("-j", "1"), "-j 1: one process is what the others are compared with. Give two or more, such as -j 2."),
        (("--steps", "0"), "--steps 0: a number from 1 to 1000."),
        (("-j", "two"), "-j 'two' is not NxM."),
    ],
)
def test_paceline_check_refuses_an_invalid_process_or_step_count_and_starts_no_run(
    words: tuple[str, ...], text: str, cli: Any
) -> None:
    script = cli.script("print('nothing')")
    assert text in cli("check", script, *words, code=2).stderr
    assert not (cli.folder / ".paceline" / "runs").exists()


def test_paceline_check_refuses_a_job_for_a_remote_compute_target(cli: Any) -> None:
    cli.script("print('nothing')")
    (cli.folder / "job.yaml").write_text("source_directory: src\nentry_script: train.py\ncompute_target: cluster\n")
    assert "compares on this machine" in cli("check", "job.yaml", code=2).stderr


def _script(cli: Any, *, loss: str = MEAN, strategy: str = "DataParallel()", epochs: int = 2, own: str = ADAM) -> str:
    text = SCRIPT.replace("LOSS", loss).replace("STRATEGY", strategy).replace("EPOCHS", str(epochs))
    text = text.replace("OPTIMIZER", own)
    return str(cli.script(text))


def _checked(cli: Any, *words: str) -> tuple[int, str]:
    # Each test starts three to five processes. Forking them avoids loading torch in each of them.
    process = cli.start("check", *words, env=forking_variables())
    out, error = process.communicate(timeout=900)
    assert "Traceback" not in error
    return process.returncode, out


@pytest.mark.promise("paceline-check-compares-three-steps", "muon-float64-equal-1e-9")
def test_paceline_check_exits_with_1_only_if_parallel_and_single_process_losses_differ(cli: Any) -> None:
    require_module("torch")
    code, out = _checked(cli, _script(cli, strategy="FullyShard()", own=MUON))
    assert code == 0, out
    assert "3 steps in float64: one process, and 2 workers (shard 2)" in out
    assert out.rstrip().endswith("equal")
    code, out = _checked(cli, _script(cli, loss=AGAINST_EACH_OTHER), "--steps", "2", "--json")
    told = json.loads(out)
    assert code == 1
    assert not told["equal"]
    assert told["steps"] == 2
    assert told["losses_apart"] > 1e-3
    assert told["layout"] == "data 2"
    runs = cli.json("list")
    assert {run["run_id"] for run in runs} >= set(told["runs"])
    # The compared tensors are as large as the model, so `paceline check` deletes them.
    assert not list(cli.folder.glob(".paceline/runs/*/outputs/check"))


@pytest.mark.parametrize(("strategy", "layout"), [("ContextParallel()", "context 2"), ("ExpertParallel()", "expert 2")])
def test_paceline_check_compares_context_and_expert_parallelism_with_one_process(
    strategy: str, layout: str, cli: Any
) -> None:
    require_module("torch")
    code, out = _checked(cli, str(cli.script(SEQUENCES.replace("STRATEGY", strategy))))
    assert code == 0, out
    assert f"3 steps in float64: one process, and 2 workers ({layout})" in out
    assert out.rstrip().endswith("equal")


def test_check_reports_a_script_with_too_few_steps(cli: Any) -> None:
    require_module("torch")
    code, out = _checked(cli, cli.script("print('nothing is trained')"))
    assert code == 1
    assert "ended in one process without a step: it calls no par.step(batch)" in out
    code, out = _checked(cli, cli.script("raise ValueError('there is no data')"))
    assert code == 1
    assert "does not come to step 3 in one process: ValueError: there is no data" in out
    code, out = _checked(cli, _script(cli), "--steps", "9")
    assert code == 1
    assert "ended in one process after 8 of 9 steps. Give --steps 8." in out
