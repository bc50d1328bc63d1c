"""HOROVOD_AUTOTUNE: try settings of the engine while the script trains, and keep those that move the most bytes a second.

A sample is a number of steps of the script; a step has ended when a tensor's name comes up again. At the end of a sample
rank 0 decides, and the decision is broadcast by the engine itself: it is done at the same place of the agreed order on
every rank, so all of them change over between the same two operations. Nothing but speed changes.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from paceline.compat.horovod.common.autotune_search import Point, Search

if TYPE_CHECKING:
    from paceline.collectives.engine import Engine

_log = logging.getLogger(__name__)
#: No more than this is fused at a time.
PIECE_BYTES = 4 << 20
_NAME = "paceline.autotune"
_HEADER = "sample,fusion_threshold_bytes,cycle_time_ms,bytes_per_second,state\n"


def begin(engine: Engine, environ: Mapping[str, str] = os.environ) -> Autotune | None:
    """Tune this engine, if HOROVOD_AUTOTUNE says so. To be called on all ranks, before any operation.

    A setting that has a variable of its own (HOROVOD_FUSION_THRESHOLD, HOROVOD_CYCLE_TIME) stays as it is.

    Raises:
        ValueError: a variable of the family is no number.
    """
    if environ.get("HOROVOD_AUTOTUNE", "0") in ("", "0") or engine.size == 1:
        return None
    tuner = Autotune(
        engine,
        Search(
            Point(fusion_bytes=min(engine.settings.fusion_bytes, PIECE_BYTES), cycle_s=engine.settings.gathering_s),
            fusion=not environ.get("HOROVOD_FUSION_THRESHOLD"),
            cycle=not environ.get("HOROVOD_CYCLE_TIME"),
            samples=_count(environ, "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", 20),
        ),
        warmup_samples=_count(environ, "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", 3),
        steps_per_sample=max(1, _count(environ, "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", 10)),
        log=environ.get("HOROVOD_AUTOTUNE_LOG"),
    )
    engine.observe(tuner.observe, process_set=0)
    return tuner


class Autotune:
    """Watches one engine's operations. point: the settings that hold now; done: they stay."""

    def __init__(
        self, engine: Engine, search: Search, *, warmup_samples: int, steps_per_sample: int, log: str | None
    ) -> None:
        self.point = search.start
        self.done = False
        self._engine, self._search = engine, search
        self._warmup, self._steps_per_sample = warmup_samples, steps_per_sample
        self._names: set[str] = set()
        self._steps = self._bytes = self._samples = 0
        self._begun_s = 0.0
        self._asked: Any = None
        self._log: TextIO | None = None
        if log and engine.rank == 0:
            Path(log).parent.mkdir(parents=True, exist_ok=True)
            self._log = open(log, "w", encoding="utf-8")  # noqa: SIM115 - closed when the tuning is done
            self._log.write(_HEADER)
            self._log.flush()

    def observe(self, request: Any, submitted_s: float, agreed_s: float | None, done_s: float) -> None:
        """Take note of an operation of the world that is done; all ranks hear of them in the same order."""
        if self.done:
            return
        try:
            self._observe(request, agreed_s, done_s)
        except Exception:
            # What goes wrong here is no reason to end the training.
            _log.warning("autotuning has ended with an error; the settings stay as they are", exc_info=True)
            self._end()

    def _observe(self, request: Any, agreed_s: float | None, done_s: float) -> None:
        if request.name.startswith(_NAME):
            self._decided(agreed_s is not None)
            return
        if self._asked is not None or agreed_s is None:
            return
        if request.name in self._names:
            self._names.clear()
            self._step(done_s)
        # A name with a number of its own each time can't come up again.
        if "noname" not in request.name:
            self._names.add(request.name)
        self._bytes += sum(
            math.prod(shape) * _WIDTHS.get(dtype, 4)
            for shape, dtype in zip(request.shapes, request.dtypes, strict=True)
        )

    def _step(self, now_s: float) -> None:
        if self._begun_s == 0.0:
            # The first step is warming up by itself.
            self._begun_s, self._bytes = now_s, 0
            return
        self._steps += 1
        if self._steps == self._steps_per_sample:
            self._ask(self._bytes / max(now_s - self._begun_s, 1e-9))

    def _ask(self, score: float) -> None:
        """Ask rank 0, on all ranks, what is to be tried next."""
        import numpy

        values = numpy.zeros(3)
        if self._engine.rank == 0:
            following: Point | None = self.point
            is_warmup = self._samples < self._warmup
            if not is_warmup:
                following = self._search.take(self.point, score)
            self._write(score, "warmup" if is_warmup else "sample")
            values[:] = (*_numbers(following or self._search.best), following is None)
        self._samples += 1
        self._asked = values
        self._engine.broadcast(f"{_NAME}.{self._samples}", values, root=0, out=values)

    def _decided(self, is_agreed: bool) -> None:
        """Change over to what rank 0 has said: at the same place of the order on every rank.

        The result is in the array by now; the handle is not done yet, and must not be waited for in this thread.
        """
        values, self._asked = self._asked, None
        if values is None or not is_agreed:
            # A rank has joined, or the engine is ending: what holds now stays.
            self._end()
            return
        fusion_bytes, cycle_s, is_end = values.tolist()
        self.point = Point(fusion_bytes=int(fusion_bytes), cycle_s=float(cycle_s))
        # Between two operations, the same two on all ranks.
        self._engine.retune(fusion_bytes=min(self.point.fusion_bytes, PIECE_BYTES), cycle_s=self.point.cycle_s)
        self._steps = self._bytes = 0
        self._begun_s = 0.0
        if is_end:
            self._write(self._search.best_score, "chosen")
            self._end()

    def _write(self, score: float, state: str) -> None:
        if self._log is not None:
            point = self.point
            with contextlib.suppress(OSError):
                self._log.write(f"{self._samples},{point.fusion_bytes},{point.cycle_s * 1e3:g},{score:.0f},{state}\n")
                self._log.flush()

    def _end(self) -> None:
        self.done = True
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.close()


#: Bytes of an element; of all others 4.
_WIDTHS = dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8) | {"complex128": 16}
_WIDTHS |= dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2) | dict.fromkeys(("uint8", "int8", "bool"), 1)


def _numbers(point: Point) -> tuple[float, float]:
    return float(point.fusion_bytes), point.cycle_s


def _count(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if text and not text.isdigit():
        raise ValueError(f"{name}={text!r} is no whole number from 0 on. Unset it (default: {default}), or give one.")
    return int(text) if text else default
