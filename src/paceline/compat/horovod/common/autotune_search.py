"""Which settings to try next: one after the other, each over a few values, the rest at their best so far. Pure.

    fusion     0  64 KiB  256 KiB  1 MiB  4 MiB        more than 4 MiB is never used at a time
    cycle      0.2  1  5  20 ms                        how long the engine gathers what is submitted

The engine has two numbers with little between them, so a search with a model (Horovod's is Bayesian) would only spend
more samples.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

#: A value has to be better by this share to be taken over one that is in use: less is noise.
_MARGIN = 0.02


@dataclass(frozen=True, kw_only=True)
class Point:
    """Settings to try."""

    fusion_bytes: int
    cycle_s: float


@dataclass
class Search:
    """Give it scores, get points. start: is tried first; fusion, cycle: may be changed; samples: scores at most."""

    start: Point
    fusion: bool = True
    cycle: bool = True
    samples: int = 20
    best: Point = field(init=False)
    best_score: float = field(init=False, default=0.0)
    _todo: list[tuple[str, float]] = field(init=False)
    _tried: set[Point] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.best = self.start
        self._todo = [("fusion_bytes", value) for value in (0, 1 << 16, 1 << 18, 1 << 20, 1 << 22) if self.fusion]
        self._todo += [("cycle_s", value) for value in (0.0002, 0.001, 0.005, 0.02) if self.cycle]

    def take(self, point: Point, score: float) -> Point | None:
        """The next point, after `point` was seen to have this score (bytes a second); None: `best` is what came out."""
        self.samples -= 1
        self._tried.add(point)
        if point == self.start or score > self.best_score * (1 + _MARGIN):
            self.best, self.best_score = point, score
        while self._todo and self.samples > 0:
            name, value = self._todo.pop(0)
            following = replace(self.best, **{name: int(value) if name == "fusion_bytes" else value})  # type: ignore[arg-type]
            if following not in self._tried:
                return following
        return None
