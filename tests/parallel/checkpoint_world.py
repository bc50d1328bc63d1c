"""A program that saves on every layout of its world's size, or goes on from what all worlds have saved.

    python checkpoint_world.py <folder> save|load

Three steps, a checkpoint, three steps more: the end is compared with six steps of a plain loop, in float64, with AdamW. The
model's embedding is tied to its head, which lies in another stage.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

#: Layout -> number of ranks, strategy as it is written.
LAYOUTS = {
    "one": (1, "Data()"),
    "data 2": (2, "Data(2)"),
    "data 4": (4, "Data(4)"),
    "shard 2": (2, "FullyShard(2)"),
    "shard 4": (4, "FullyShard(4)"),
    "tensor 2": (2, "Tensor(2)"),
    "pipe 2": (2, "Pipeline(2)"),
    "pipe 4": (4, "Pipeline(4)"),
    "data 2 pipe 2": (4, "Data(2) @ Pipeline(2)"),
}


def case() -> Any:
    """The tied transformer, of few tensors: each load reads all of them on each rank."""
    from tests.parallel.models import CASES, Transformer

    return dataclasses.replace(CASES["transformer_tied"], make=lambda: Transformer(tied=True, depth=2))


def main(folder: Path, phase: str) -> None:
    import torch

    from paceline.parallel import mesh
    from tests.parallel.equality import alone

    torch.set_num_threads(1)
    place = mesh.start()
    one = alone(case(), rows=(8,) * (3 if phase == "save" else 6))
    found = {}
    for layout, (size, _) in LAYOUTS.items():
        if size != place.size:
            continue
        # Another seed where it is loaded: what is not in the checkpoint would be seen.
        par, given = training(layout, seed=5 if phase == "save" else 6)
        if phase == "save":
            found[f"{layout} saves"] = distances(par, given[:3], one)
            par.save(path_of(folder, layout))
        else:
            for other in LAYOUTS:
                assert par.load(path_of(folder, other))
                found[f"{other} -> {layout}"] = distances(par, given[3:], one)
    if place.rank == 0:
        (folder / f"{phase}_{place.size}.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


def path_of(folder: Path, layout: str) -> Path:
    return folder / layout.replace(" ", "-")


def training(layout: str, seed: int) -> tuple[Any, list[Any]]:
    """The case on this layout, and its batches."""
    import torch

    import paceline
    from paceline.parallel import Data, FullyShard, Pipeline, Tensor
    from tests.parallel.equality import adamw, batches, made

    chosen = case()
    given = batches(chosen, torch.float64, (8,) * 6)
    model = made(chosen, torch.float64, seed=seed)
    names = {"Data": Data, "FullyShard": FullyShard, "Pipeline": Pipeline, "Tensor": Tensor}
    par = paceline.parallelize(
        model,
        adamw(model),
        given,
        loss=chosen.loss,
        loss_weight=chosen.loss_weight,
        strategy=eval(LAYOUTS[layout][1], names),
        microbatches=4,
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
    main(Path(sys.argv[1]), sys.argv[2])
