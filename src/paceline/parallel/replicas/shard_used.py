"""Which parameters of a sharded model get a gradient. Imports torch.

FSDP2 can send zeros for a parameter that was not used, so that all ranks' messages have one length; but then it can't be
told from one whose gradient is 0, and an optimizer would decay what a plain loop leaves alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.parallel.errors import ParallelError
from paceline.parallel.mesh import World
from paceline.torch_private import whole_parameters


class Used:
    """Watches a module's parameters, and takes the gradient from those that no rank has used.

    find_unused: as for `parallelize`; None goes by the first step.
    """

    def __init__(self, module: nn.Module, world: World, find_unused: bool | None) -> None:
        self._module = module
        self._group = world.replica_group
        self._device = world.device
        self._asked_for_unused = find_unused
        self._hooked: set[int] = set()
        self._seen: set[str] = set()
        # Now, while they are in parts: after a forward pass some are whole, which are others.
        self._all = {id(param): name for name, param in module.named_parameters()}
        self._begin(self._trained())

    def follow(self) -> None:
        """Begin anew, before a step, if parameters were frozen or unfrozen."""
        trained = self._trained()
        if trained != set(self._names.values()):
            self._begin(trained)

    def _begin(self, trained: set[str]) -> None:
        self._names = {key: name for key, name in self._all.items() if name in trained}
        self._find_unused = self._asked_for_unused
        #: Those that got no gradient in the first step, on some rank or on all.
        self.unused: tuple[str, ...] = ()
        self._is_first = True

    def _trained(self) -> set[str]:
        return {name for name, param in self._module.named_parameters() if param.requires_grad}

    def watch(self) -> None:
        """Called between forward and backward: the parameters as a whole exist from the first forward pass on."""
        for sharded, whole in whole_parameters(self._module):
            name = self._names.get(id(sharded))
            if name is not None and id(whole) not in self._hooked:
                self._hooked.add(id(whole))
                held: Any = whole
                held.register_post_accumulate_grad_hook(lambda _, name=name: self._seen.add(name))

    def finish(self) -> None:
        """Called on all ranks after the last microbatch.

        Raises:
            ParallelError: a parameter that was used in the first step is not used now.
        """
        names = list(self._names.values())
        idle = [name not in self._seen and not _is_alone(param) for name, param in self._params(names)]
        self._seen.clear()
        if self._find_unused or self._is_first:
            self._drop(names, idle)
        elif any(idle):
            missing = ", ".join(name for name, flag in zip(names, idle, strict=True) if flag)
            raise ParallelError(
                f"no gradient in this step for {missing}, which had one in the first step. Give "
                "parallelize(find_unused=True) if the model's forward pass leaves out parts of it now and then."
            )
        self._is_first = False

    def _drop(self, names: list[str], idle: list[bool]) -> None:
        if not names:
            return
        counts = torch.tensor(idle, dtype=torch.int32, device=self._device)
        dist.all_reduce(counts, group=self._group)
        ranks = dist.get_world_size(self._group)
        found = dict(zip(names, counts.tolist(), strict=True))
        for name, param in self._params(names):
            if found[name] == ranks:
                param.grad = None
        if self._is_first:
            self.unused = tuple(name for name in names if found[name])
            if self._find_unused is None:
                self._find_unused = bool(self.unused)

    def _params(self, names: list[str]) -> list[tuple[str, nn.Parameter]]:
        params = dict(self._module.named_parameters())
        return [(name, params[name]) for name in names]


def _is_alone(param: nn.Parameter) -> bool:
    """Whether it is no part of a whole: FSDP2 leaves numbers without a dimension as they are."""
    return param.dim() == 0
