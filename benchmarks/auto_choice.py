"""The layout that strategy="auto" takes against all that it could have taken, for six models; forecasts against the clock.

    python benchmarks/auto_choice.py            on 2 processes; PACELINE_BENCH_RANKS=4 on 4

Each layout trains the same batch in the same processes, in turn; what counts is the median time of a step. The figure is the
worst model's time with the layout that "auto" chose, divided by that of the fastest layout.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from common import in_turn, median, report
from parallel_speed import _block, _model, _world
from ranks import figures, is_rank, tell

RANKS = int(os.environ.get("PACELINE_BENCH_RANKS", "2"))
MICROBATCHES, ROUNDS = 4, 5


def main() -> None:
    found = figures(RANKS)
    worst = max(found.values(), key=lambda one: one["times"])
    report(
        f"auto_choice_{RANKS}",
        f"strategy='auto' on {RANKS} processes: a step of the layout that it takes against the fastest, worst of six models",
        "at most 1.1 times as long",
        worst["times"] <= 1.1,
        times=worst["times"],
        forecast_off=median([abs(off) for one in found.values() for off in one["off"].values()]),
        models=found,
    )


def models() -> dict[str, tuple[Callable[[], Any], Any, Any, Any]]:
    """Name -> what makes it, a batch's input and target, and its loss."""
    import torch
    from torch import nn
    from torch.nn.functional import cross_entropy

    def tokens(output: Any, target: Any) -> Any:
        return cross_entropy(output.flatten(0, 1), target.flatten())

    def stack(width: int, depth: int) -> Any:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)))

    def network() -> Any:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Conv2d(24 if n else 3, 24, 3, padding=1), nn.ReLU()) for n in range(8)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))

    def words() -> Any:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Embedding(20000, 128),
            *(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(4)),
            nn.Linear(128, 500),
        )

    torch.manual_seed(1)
    draw, choose = torch.randn, torch.randint
    return {
        "transformer": (_model, choose(0, 256, (16, 64)), choose(0, 256, (16, 64)), tokens),
        "wide": (partial(stack, 1536, 4), draw(32, 1536), choose(0, 1536, (32,)), cross_entropy),
        "deep": (partial(stack, 256, 24), draw(256, 256), choose(0, 256, (256,)), cross_entropy),
        "many rows": (partial(stack, 128, 6), draw(4096, 128), choose(0, 128, (4096,)), cross_entropy),
        "images": (network, draw(64, 3, 24, 24), choose(0, 10, (64,)), cross_entropy),
        "vocabulary": (words, choose(0, 20000, (16, 64)), choose(0, 500, (16, 64)), tokens),
    }


def on_a_rank() -> None:
    import torch

    from paceline.parallel.forecast.predict import candidates, name_of_layout
    from paceline.parallel.strategy import resolve

    torch.set_num_threads(1)
    found = {}
    with _world("gloo"):
        for name, (make, x, y, loss) in models().items():
            sides, names = [], []
            for strategy in candidates(RANKS):
                layout = name_of_layout(resolve(strategy, RANKS))
                if "Tensor" not in layout:
                    sides.append(_step(make, x, y, loss, strategy)[0])
                    names.append(layout)
            step, par = _step(make, x, y, loss, "auto")
            step()
            text = par.explain()
            times = dict(
                zip(names, map(median, in_turn(ROUNDS, *(partial(_block, side) for side in sides))), strict=True)
            )
            found[name] = {
                "chosen": text.chosen,
                "ms": {layout: 1e3 * seconds for layout, seconds in times.items()},
                "times": times[text.chosen] / min(times.values()),
                "off": {
                    layout: text.forecasts[layout].step_s / seconds - 1
                    for layout, seconds in times.items()
                    if not text.forecasts[layout].reason
                },
            }
    if int(os.environ["OMPI_COMM_WORLD_RANK"]) == 0:
        tell(found)


def _step(make: Callable[[], Any], x: Any, y: Any, loss: Any, strategy: Any) -> tuple[Callable[[], Any], Any]:
    import torch

    import paceline

    model = make()
    par = paceline.parallelize(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        loss=loss,
        strategy=strategy,
        microbatches=MICROBATCHES,
        sample=(x, y),
        check="off",
    )
    return lambda: par.step((x, y)), par


if __name__ == "__main__":
    on_a_rank() if is_rank() else main()
