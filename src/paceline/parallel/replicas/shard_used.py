"""Find which parameters of a sharded model got a gradient in a step.

FSDP2 can send zeros for an unused parameter, so that all ranks' messages have the same length. But then the optimizer would see
a gradient of 0, and apply weight decay to a parameter that a plain loop leaves alone.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from paceline.parallel.errors import ParallelError
from paceline.parallel.gradient_hooks import Hooks
from paceline.parallel.mesh import World
from paceline.torch_private import is_being_made_whole, whole_parameters


class Used:
    """An observer that removes the gradients of unused parameters.

    `find_unused` is the setting of `parallelize`. With None, only parameters that the first step skips may be unused.
    """

    def __init__(self, module: nn.Module, world: World, find_unused: bool | None) -> None:
        self._module = module
        self._group = world.replica_group
        self._device = world.device
        self._asked_for_unused = find_unused
        self._hooked: set[int] = set()
        self._seen: set[str] = set()
        self._watched = 0
        # Record the ids of sharded parameters now, because a forward pass may leave gathered parameters in their place.
        self._all = {id(param): name for name, param in module.named_parameters()}
        self._begin(self._trained())

    def follow(self) -> None:
        """Look for unused parameters again if parameters were frozen or unfrozen."""
        trained = self._trained()
        if trained != set(self._names.values()):
            self._begin(trained)

    def begin_anew(self) -> None:
        """Look for unused parameters again in the next step."""
        self._begin(self._trained())

    def _begin(self, trained: set[str]) -> None:
        self._names = {key: name for key, name in self._all.items() if name in trained}
        self._find_unused = self._asked_for_unused
        #: Names of the parameters that had no gradient on at least one rank in the first step.
        self.unused: tuple[str, ...] = ()
        self._is_first = True

    def _trained(self) -> set[str]:
        return {name for name, param in self._module.named_parameters() if param.requires_grad}

    def settle(self) -> None:
        """Before a forward pass, free parameters that FSDP2 has gathered early.

        FSDP2's backward pass also gathers units that it does not need, such as frozen units. Without this call the next
        microbatch would use these old values, even if its forward pass changes the parameters first.
        """
        for part in self._module.modules():
            if is_being_made_whole(part):
                held: Any = part
                held.unshard()
                held.reshard()

    def watch(self) -> None:
        """After a forward pass, register hooks that record which parameters get gradients."""
        self._watched += 1
        for sharded, whole in whole_parameters(self._module):
            name = self._names.get(id(sharded))
            if name is None:
                continue
            hooks: Hooks | None = getattr(sharded, "_paceline_hooks", None)
            if hooks is not None and hooks.after and self._watched > 1:
                raise ParallelError(
                    f"{name} has a hook of register_post_accumulate_grad_hook, which is called with the gradients of all "
                    "microbatches so far; FullyShard() has those of one at a time. Give microbatches=1, use register_hook, "
                    "or DataParallel()."
                )
            # Register the hook only once per gathered parameter: FSDP2 creates this object once, and refills it in each pass.
            if id(whole) not in self._hooked:
                self._hooked.add(id(whole))
                if hooks is not None:
                    hooks.put_on(whole)
                held: Any = whole
                held.register_post_accumulate_grad_hook(lambda _, name=name: self._seen.add(name))

    def finish(self) -> None:
        """Remove the gradients of unused parameters at the end of a step.

        Every rank must call this.

        Raises:
            ParallelError: A parameter that the first step used has no gradient now.
        """
        names = list(self._names.values())
        # Exclude 0-dim parameters, which FSDP2 leaves whole.
        idle = [name not in self._seen and param.dim() > 0 for name, param in self._params(names)]
        self._seen.clear()
        self._watched = 0
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
        idle_ranks = dict(zip(names, counts.tolist(), strict=True))
        for name, param in self._params(names):
            if idle_ranks[name] == ranks:
                # No rank has used the parameter, so its gradient has only the zeros with which Paceline filled FSDP2's message.
                param.grad = None
        if self._is_first:
            self.unused = tuple(name for name in names if idle_ranks[name])
            if self._find_unused is None:
                self._find_unused = bool(self.unused)

    def _params(self, names: list[str]) -> list[tuple[str, nn.Parameter]]:
        params = dict(self._module.named_parameters())
        return [(name, params[name]) for name in names]
