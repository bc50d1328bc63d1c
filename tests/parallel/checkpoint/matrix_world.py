"""A program that saves on the layouts of its world's size, then continues from checkpoints of other worlds.

    python matrix_world.py <folder> '["data 2 saves", "data 2 -> shard 4", ...]'

The worlds of all sizes run at the same time, so that each process is started once. Three steps, a checkpoint, three steps
more: the end is compared with six steps of a plain loop, in float64, with AdamW. The model's embedding is tied to its head,
which is in another stage.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]

#: Maximum time in seconds to wait until the processes with other layouts have saved. Such a process may have failed.
WAIT_S = 150.0
#: Layout -> number of ranks, strategy as code.
LAYOUTS = {
    "one": (1, "DataParallel()"),
    "data 2": (2, "DataParallel(2)"),
    "data 4": (4, "DataParallel(4)"),
    "shard 2": (2, "FullyShard(2)"),
    "shard 4": (4, "FullyShard(4)"),
    "tensor 2": (2, "TensorParallel(2)"),
    "pipe 2": (2, "PipelineParallel(2)"),
    "pipe 4": (4, "PipelineParallel(4)"),
    "data 2 pipe 2": (4, "DataParallel(2) @ PipelineParallel(2)"),
    "shard 2 tensor 2": (4, "FullyShard(2) @ TensorParallel(2)"),
}


def case() -> Any:
    """The tied transformer, of few tensors: each load reads all of them on each rank."""
    from tests.parallel.models import SHALLOW

    return SHALLOW["transformer_tied"]


def main(folder: Path, asked: list[str]) -> None:
    import torch

    from paceline.parallel import mesh
    from tests.parallel.equality import alone

    torch.set_num_threads(1)
    place = mesh.start()
    own = [layout for layout, (size, _) in LAYOUTS.items() if size == place.size]
    saved = [
        layout for layout in LAYOUTS if any(name.startswith((f"{layout} saves", f"{layout} ->")) for name in asked)
    ]
    found = {}
    one = alone(case(), rows=(8,) * 3)
    for layout in (layout for layout in own if layout in saved):
        par, given = training(layout, seed=5)
        found[f"{layout} saves"] = distances(par, given[:3], one)
        par.save(path_of(folder, layout))
    await_checkpoints(folder, saved)
    one = alone(case(), rows=(8,) * 6)
    for layout in (layout for layout in own if any(name.endswith(f" -> {layout}") for name in asked)):
        # Use another seed, so that a value that is missing in the checkpoint would be noticed.
        par, given = training(layout, seed=6)
        for other in (other for other in LAYOUTS if f"{other} -> {layout}" in asked):
            assert par.load(path_of(folder, other))
            found[f"{other} -> {layout}"] = distances(par, given[3:], one)
    if place.rank == 0:
        (folder / f"found_{place.size}.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def await_checkpoints(folder: Path, layouts: list[str]) -> None:
    """Return once every world has saved these. A checkpoint's folder has its name only when it is complete."""
    deadline = time.monotonic() + WAIT_S
    while missing := [layout for layout in layouts if not path_of(folder, layout).is_dir()]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody has saved {missing} within {WAIT_S:g} s")
        time.sleep(0.05)


def path_of(folder: Path, layout: str) -> Path:
    return folder / layout.replace(" ", "-")


def training(layout: str, seed: int) -> tuple[Any, list[Any]]:
    """The case on this layout, and its batches."""
    import torch

    import paceline
    from paceline.parallel import DataParallel, FullyShard, PipelineParallel, TensorParallel
    from tests.parallel.equality import adamw, batches, made

    chosen = case()
    given = batches(chosen, torch.float64, (8,) * 6)
    model = made(chosen, torch.float64, seed=seed)
    names = {
        "DataParallel": DataParallel,
        "FullyShard": FullyShard,
        "PipelineParallel": PipelineParallel,
        "TensorParallel": TensorParallel,
    }
    par = paceline.parallelize(
        model,
        adamw(model),
        given,
        loss=chosen.loss,
        loss_weight=chosen.loss_weight,
        strategy=eval(LAYOUTS[layout][1], names),
        # Pipeline stages need several microbatches. Models without stages are saved in the same way with one.
        microbatches=4 if "pipe" in layout else 1,
        # Switch the comparison in the first step off, because the test compares the result of all steps with a plain
        # loop.
        check="off",
    )
    return par, given


def distances(par: Any, given: list[Any], one: Any) -> dict[str, float]:
    """How far the losses of these batches, and the parameters after them, are from the plain loop's."""
    losses = [float(par.step(batch)) for batch in given]
    state = par.full_state_dict()
    return {
        "loss": max(abs(a - b) for a, b in zip(losses, one.losses[-3:], strict=True)),
        "parameters": max(float((state[name] - param).abs().max()) for name, param in one.parameters.items()),
        "steps": par.progress.steps,
    }


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\..*")
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
