"""The random numbers of each replica and stage: dropout and the like. Loaded on use: it imports torch.

Each step starts its stream anew, from (seed, step, replica, stage): two runs give the same numbers, a run that was
resumed gives those it would have had, replicas and stages have different ones, and the ranks of a tensor group, which
compute the same rows together, the same. The process's own generators are put back afterwards.

A world of one is left alone: there, dropout draws from torch's generators as in a plain loop. So with dropout a step is
not equal on two layouts; it is reproducible on each.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.steady import drawing


class Streams:
    """This rank's random streams."""

    def __init__(self, *, seed: int, replica: int, stage: int, device: torch.device, active: bool) -> None:
        self.seed = seed
        self._replica = replica
        self._stage = stage
        self._device = device
        self._active = active

    @contextlib.contextmanager
    def use(self, purpose: str, number: int) -> Iterator[None]:
        """Torch's generators, set to the stream of this purpose and number, until the block ends."""
        if not self._active:
            yield
            return
        # A stream begins anew in each step, and does not go on from the last one, so that a run that is resumed at a step
        # draws what it would have drawn.
        seed = derive(purpose, self.seed, number, self._replica, self._stage)
        with generators(seed, self._device):
            yield

    def state_dict(self) -> dict[str, Any]:
        """The part of a checkpoint that is kept here: the seed; in a world of one the state of torch's generators too."""
        state: dict[str, Any] = {"seed": self.seed}
        if not self._active:
            state["cpu"] = torch.get_rng_state()
            if self._device.type == "cuda":
                state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken; the generators' own state only from a world of one to a world of one."""
        self.seed = int(state["seed"])
        if not self._active and "cpu" in state:
            torch.set_rng_state(state["cpu"])
            if self._device.type == "cuda" and "cuda" in state:
                torch.cuda.set_rng_state(state["cuda"], self._device)


def derive(purpose: str, *numbers: int) -> int:
    """A seed of 63 bits; frozen, for checkpoints go on with it."""
    text = f"paceline stream 1 {purpose} {' '.join(map(str, numbers))}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def normal(shape: Sequence[int], purpose: str, *numbers: int) -> Tensor:
    """Standard normal numbers, the same for purpose and numbers; drawn on the CPU, for a GPU's generator gives others."""
    generator = torch.Generator().manual_seed(derive(purpose, *numbers))
    with drawing():
        return torch.randn(shape, generator=generator, device="cpu")


@contextlib.contextmanager
def generators(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's generators for the CPU and for `device`, seeded, and put back afterwards."""
    before = torch.get_rng_state()
    before_cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    # `torch.manual_seed` would also seed GPUs other than this rank's, and put none of them back.
    torch.default_generator.manual_seed(seed)
    if before_cuda is not None:
        torch.cuda.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)
        if before_cuda is not None:
            torch.cuda.set_rng_state(before_cuda, device)
