"""Programs on ranks that are killed while they save, and that share an epoch among worlds of several sizes.

python scenes.py <folder> killed        rank 1 is killed while it writes; the others can't go on
python scenes.py <folder> after         the previous checkpoint is loaded, and another one saved
python scenes.py <folder> sizes <n> <attempt>   n steps of each layout from its last checkpoint; then a signal to end
python scenes.py <folder> epoch <n>     n batches of the epoch (0: all remaining) from the last checkpoint
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SAMPLES, BATCH = 53, 8


def training(folder: Path, seed: int = 5) -> tuple[Any, Any]:
    """A model on all workers of the world, and its batches by number."""
    import torch

    import paceline
    from paceline.parallel import FullyShard
    from tests.parallel.equality import adamw, batches, made
    from tests.parallel.models import CASES

    case = CASES["mlp"]
    model = made(case, torch.float64, seed=seed)
    given = batches(case, torch.float64, (8,) * 3)
    return paceline.parallelize(model, adamw(model), given, loss=case.loss, strategy=FullyShard(), check="off"), given


def killed(folder: Path) -> None:
    import torch

    from paceline.parallel import failure
    from paceline.parallel.checkpoint import folder as folders

    # After the kill no rank answers any more, so a short grace period suffices.
    failure.GRACE_S = 1.0
    par, given = training(folder)
    par.step(given[0])
    par.save(folder / "kept")
    if par.rank == 0:
        torch.save(par.full_state_dict(), folder / "expected.pt")
    else:
        par.full_state_dict()
        folders.write_file = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    par.step(given[1])
    par.save(folder / "kept")


def after(folder: Path) -> None:
    import torch

    par, given = training(folder, seed=6)
    assert par.load(folder / "kept")
    assert par.progress.steps == 1
    expected = torch.load(folder / "expected.pt", weights_only=True)
    for name, tensor in par.full_state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    par.step(given[1])
    par.save(folder / "kept")


def epoch(folder: Path, count: str) -> None:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    import paceline
    from paceline.parallel import DataParallel

    class Numbers(Dataset[Any]):
        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> Any:
            return torch.tensor([float(index)]), torch.tensor([0.0])

    class Noting(nn.Module):
        """Writes down which samples it is given."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(1, 1)
            self.seen: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += [int(value) for value in x[:, 0]]
            return self.inner(x)

    model = Noting()
    loader = DataLoader(Numbers(), batch_size=BATCH, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    par = paceline.parallelize(
        model,
        optimizer,
        loader,
        loss=nn.functional.mse_loss,
        strategy=DataParallel(),
        microbatches=2,
        seed=3,
        check="off",
    )
    os.environ["PACELINE_CHECKPOINT_DIR"] = str(folder / "steps")
    par.load()
    model.seen.clear()
    seen: list[int] = []
    for number, batch in enumerate(par.epoch(0), 1):
        model.seen.clear()
        par.step(batch)
        # A replica without rows of its own computes an extra row, which does not count.
        seen += model.seen[: batch.rows]
        if number == int(count):
            break
    par.save()
    (folder / f"seen_{par.world_size}_{par.rank}.json").write_text(json.dumps(seen))


def sizes(folder: Path, count: str, attempt: str) -> None:
    """Train over epochs whose number of samples no batch divides, and end as a worker of an elastic run that is to grow."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import paceline
    from paceline.parallel import DataParallel, FullyShard, PipelineParallel

    kinds = {"data": DataParallel, "shard": FullyShard, "pipe": PipelineParallel}
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 6, generator=draw, dtype=torch.float64)
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())

    def build(kind: str) -> Any:
        # Each attempt starts with different weights, so that a value that is missing in the checkpoint would be noticed.
        torch.manual_seed(int(attempt))
        layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())]
        model = nn.Sequential(*layers, nn.Linear(6, 1)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = DataLoader(data, batch_size=BATCH, shuffle=True)
        return paceline.parallelize(
            model,
            optimizer,
            loader,
            loss=nn.functional.mse_loss,
            strategy=kinds[kind](),
            # Pipeline stages need several microbatches.
            microbatches=4 if kind == "pipe" else 1,
            seed=3,
            check="off",
        )

    request = folder / f"request_{attempt}"
    os.environ["PACELINE_ELASTIC_REQUEST"] = str(request)
    made = {kind: build(kind) for kind in kinds}
    codes = set()
    for kind, par in made.items():
        os.environ["PACELINE_CHECKPOINT_DIR"] = str(folder / kind)
        assert par.load() == (attempt != "1")
        losses: list[float] = []
        try:
            while len(losses) < int(count):
                for batch in par.epoch(par.progress.epoch):
                    losses.append(float(par.step(batch)))
                    if len(losses) == int(count):
                        request.touch()
                    assert par.save(every=1000) is None
        except SystemExit as end:
            codes.add(end.code)
        if par.rank == 0:
            (folder / f"losses_{kind}_{attempt}.json").write_text(json.dumps(losses))
        torch.distributed.barrier() if torch.distributed.is_initialized() else None
        request.unlink(missing_ok=True)
        torch.distributed.barrier() if torch.distributed.is_initialized() else None
    assert codes == {79}


def main(folder: Path, scene: str, *arguments: str) -> None:
    import torch

    torch.set_num_threads(1)
    {"killed": killed, "after": after, "epoch": epoch, "sizes": sizes}[scene](folder, *arguments)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\..*")
    main(Path(sys.argv[1]), *sys.argv[2:])
