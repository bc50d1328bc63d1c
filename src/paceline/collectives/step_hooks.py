"""Hooks in torch by which the step clock (`paceline.system.step_clock`) measures a script's steps.

    steps           each optimizer's step, by torch's own hook
    data            the time until a DataLoader returns the next batch
    other ranks     waits for a collective of torch.distributed, by the script or a library; DistributedDataParallel waits in
                    C++, so its own figures are used: from its last gradient to the end of its last message

On GPUs the main thread does not wait in collectives, so the hooks measure only steps and data.
"""

from __future__ import annotations

# Don't import TYPE_CHECKING from typing, which loads slowly: each worker loads this module before its script.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any
    from weakref import ref

    from torch.nn.parallel import DistributedDataParallel

    from paceline.system.step_clock import StepClock

#: Seconds between two queries of the DistributedDataParallel models.
_ASK_S = 1.0
#: Weak references to the script's DistributedDataParallel models.
_replicas: list[ref[DistributedDataParallel]] = []
#: Time at which this module last read DDP's waiting times, and number of steps at that time; None before the first read.
_last_query: tuple[float, int] | None = None


def count_steps() -> None:
    """Install hooks in torch that time training steps, if the launcher requests it."""
    from paceline.system import step_clock
    from paceline.system.lazy_import import when_loaded

    if step_clock.begin() is None:
        return

    when_loaded("torch.optim.optimizer", _follow_steps)
    when_loaded("torch.utils.data.dataloader", _follow_data)
    when_loaded("torch.nn.parallel.distributed", _follow_replicas)


def follow_collectives() -> None:
    """Measure waits in torch.distributed, which the script has just imported."""
    from paceline import torch_private
    from paceline.system import step_clock

    # If this torch release has no class `Work`, the waits for collectives are not measured.
    work = torch_private.work_class()
    if work is not None:
        try:
            work.wait = step_clock.timed(work.wait, step_clock.WAIT)
        except (AttributeError, TypeError):
            pass


def _follow_steps(module: ModuleType) -> None:
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is not None:
        register(_stepped)


def _stepped(optimizer: object, args: object, kwargs: object) -> None:
    import sys

    from paceline.system.step_clock import clock

    # While torch.compile traces a step, do nothing: otherwise this code would become a part of the compiled graph.
    if sys.modules["torch"].compiler.is_compiling():
        return
    if (running := clock()) is not None:
        running.step(optimizer)
        if _replicas:
            _ask_replicas(running)


def _follow_data(module: ModuleType) -> None:
    from paceline import torch_private
    from paceline.system import step_clock

    iterator = torch_private.data_iterator_class(module)
    if iterator is not None:
        iterator.__next__ = step_clock.timed(iterator.__next__, step_clock.DATA)


def _follow_replicas(module: ModuleType) -> None:
    import functools
    import weakref

    kind: Any = module.DistributedDataParallel
    made = kind.__init__

    @functools.wraps(made)
    def __init__(self: DistributedDataParallel, *args: object, **kwargs: object) -> None:  # noqa: N807
        made(self, *args, **kwargs)
        from paceline import torch_private

        if torch_private.time_every_step(self):
            _replicas.append(weakref.ref(self))

    kind.__init__ = __init__


def _ask_replicas(clock: StepClock) -> None:
    """Add to `clock` how long DistributedDataParallel models waited for other ranks."""
    import time

    from paceline import torch_private

    global _last_query
    now, steps = time.monotonic(), clock.steps
    before, made = _last_query or (now, steps)
    if _last_query is not None and now - before < _ASK_S:
        return
    _last_query = (now, steps)
    for reference in list(_replicas):
        model = reference()
        waited_s = None if model is None else torch_private.waited_s(model)
        if waited_s is None:
            _replicas.remove(reference)
        else:
            # torch reports only the last step's waiting time. Assume the same time for all steps since the previous query.
            clock.waited(min((steps - made) * waited_s, now - before))
