"""A pipeline's schedule as text and as a PNG. Standard library only; the PNG needs matplotlib.

worker 0  F0 F1 .. .. B0 B0 F2 B1 B1 .. B2 B2
worker 1  .. F0 B0 B0 F1 B1 B1 F2 B2 B2 .. ..
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.parallel.errors import ParallelError
from paceline.parallel.pipeline.timeline import Event


def draw_text(events: Sequence[Event], workers: int) -> str:
    """A line for each worker and a cell for each unit of time: F or B and the microbatch; a dot a unit for waiting.

    With several stages on a worker the stage stands first: `4:F0`. Times have to be whole numbers.
    """
    several = any(event.call.stage >= workers for event in events)
    labels = {event: _label(event, several) for event in events}
    width = max(map(len, labels.values()), default=1)
    length = int(max((event.end for event in events), default=0))
    rows = [["." * min(width, 2)] * length for _ in range(workers)]
    for event in events:
        for unit in range(int(event.start), int(event.end)):
            rows[event.worker][unit] = labels[event]
    return "\n".join(
        f"worker {worker}  {' '.join(cell.ljust(width) for cell in row).rstrip()}" for worker, row in enumerate(rows)
    )


def save_png(events: Sequence[Event], workers: int, path: str | Path, title: str = "") -> Path:
    """The path of the picture: a row for each worker, forward passes light, backward passes dark.

    Raises:
        ParallelError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ParallelError(
            f"{path}: drawing a PNG needs matplotlib, which this Python doesn't have. pip install matplotlib, "
            "or print the schedule as text."
        ) from error
    length = max(event.end for event in events)
    figure = Figure(figsize=(min(24.0, 2.0 + 0.28 * length), 1.2 + 0.5 * workers), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    chunks = len({event.call.stage for event in events}) // workers
    for event in events:
        dark = event.call.kind == "B"
        # A stage further along is a little darker.
        shade = 0.15 * (event.call.stage // workers) / max(chunks - 1, 1)
        color = (0.13 - shade / 2, 0.44 - shade, 0.71 - shade) if dark else (0.78 - shade, 0.86 - shade, 0.94)
        axes.barh(
            event.worker, event.end - event.start, left=event.start, height=0.86, color=color, edgecolor="white", lw=0.8
        )
        axes.text(
            (event.start + event.end) / 2,
            event.worker,
            str(event.call.micro),
            ha="center",
            va="center",
            fontsize=8,
            color="white" if dark else "black",
        )
    axes.set(xlim=(0, length), yticks=range(workers), yticklabels=[f"worker {worker}" for worker in range(workers)])
    axes.set_xlabel("time (one forward pass of the average stage = 1)")
    axes.set_title(title or "light: forward, dark: backward, numbers: microbatches", fontsize=9)
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    path = Path(path)
    figure.savefig(path, dpi=140)
    return path


def _label(event: Event, several: bool) -> str:
    text = f"{event.call.kind}{event.call.micro}"
    return f"{event.call.stage}:{text}" if several else text
