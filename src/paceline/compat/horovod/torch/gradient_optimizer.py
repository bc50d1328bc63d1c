"""The mixins that DistributedOptimizer puts before an optimizer's class: backward hooks reduce gradients.

With op=Adasum each rank takes its own step. Then the steps are combined, instead of the gradients (Maleki et al.,
"Scaling Distributed Training with Adaptive Summation", 2020).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.compat.horovod.common import handles
from paceline.compat.horovod.common.ops import Adasum, Average, Sum
from paceline.compat.horovod.common.reduction import Reduction
from paceline.compat.horovod.torch.allreduce import allreduce_async_, submit_allreduce
from paceline.compat.horovod.torch.gather import sparse_allreduce_async

Finish = Callable[[], None]

#: Parameter -> hook of the newest optimizer with this parameter. Older optimizers reduce it in `synchronize`, not in a hook.
_HOOKS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class GradientReduction(Reduction):
    """The reduction of parameters' gradients, one by one or in groups."""

    def begin(self, p: torch.Tensor, name: str) -> Finish:
        """Submit the gradient, and return a function that waits and stores the result."""
        grad = p.grad
        assert grad is not None
        if grad.is_sparse and not self.sparse_as_dense:
            return self._begin_sparse(p, grad, name)
        dense = grad.to_dense() if grad.is_sparse else grad
        sent, ctx = self.compression.compress(dense)
        # Reduce the compressed gradient in place, to save memory. Without compression, it is the gradient itself.
        handle = submit_allreduce([sent], name, self.how, in_place=True)
        return lambda: self._put(p, dense, handles.synchronize(handle), ctx)

    def begin_group(self, members: list[torch.Tensor], name: str) -> Finish:
        """Submit gradients, dense ones together. Return a function that waits and stores the results."""
        finishes, dense = [], []
        for index, p in enumerate(members):
            assert p.grad is not None
            if p.grad.is_sparse and not self.sparse_as_dense:
                finishes.append(self._begin_sparse(p, p.grad, f"{name}.{index}"))
            else:
                dense.append((p, p.grad.to_dense() if p.grad.is_sparse else p.grad))
        if dense:
            sent = [self.compression.compress(grad) for _, grad in dense]
            handle = submit_allreduce([tensor for tensor, _ in sent], name, self.how, grouped=True, in_place=True)
            finishes.append(lambda: self._put_all(dense, handles.synchronize(handle), [ctx for _, ctx in sent]))

        def finish_all() -> None:
            for finish in finishes:
                finish()

        return finish_all

    def _begin_sparse(self, p: torch.Tensor, grad: torch.Tensor, name: str) -> Finish:
        if self.op not in (Average, Sum):
            raise ValueError(
                f"the gradient of {name!r} is sparse: use op=hvd.Average, hvd.Sum or sparse_as_dense=True."
            )
        own = grad.coalesce()
        values, ctx = self.compression.compress(own.values())
        sent = torch.sparse_coo_tensor(own.indices(), values, own.shape, is_coalesced=True, check_invariants=False)
        result = sparse_allreduce_async(sent, name, self.op, self.process_set)

        def finish() -> None:
            reduced = result()
            back = self.compression.decompress(reduced._values(), ctx)
            p.grad = torch.sparse_coo_tensor(reduced._indices(), back, reduced.shape, check_invariants=False).coalesce()

        return finish

    def _put(self, p: torch.Tensor, grad: torch.Tensor, reduced: torch.Tensor, ctx: object) -> None:
        """Decompress a reduced gradient into `grad`. Update a sparse `p.grad` too."""
        back = self.compression.decompress(reduced, ctx)
        if back.data_ptr() != grad.data_ptr() or back.dtype != grad.dtype or back.stride() != grad.stride():
            with torch.no_grad():
                grad.copy_(back)
        # Make the gradient sparse again, because optimizers such as SparseAdam accept only sparse gradients.
        if p.grad is not None and p.grad.is_sparse:
            p.grad = grad.to_sparse(p.grad.sparse_dim())

    def _put_all(
        self, sent: list[tuple[torch.Tensor, torch.Tensor]], reduced: list[torch.Tensor], contexts: list[object]
    ) -> None:
        for (p, grad), tensor, ctx in zip(sent, reduced, contexts, strict=True):
            self._put(p, grad, tensor, ctx)


class GradientOptimizer:
    """A mixin that reduces gradients, for torch's optimizer classes."""

    # Declared for type checkers. The wrapped optimizer's class, which is the next base class, sets this attribute.
    param_groups: list[dict[str, Any]]

    def _begin(
        self,
        *,
        reduction: GradientReduction,
        names: dict[torch.Tensor, str],
        groups: list[tuple[str, list[torch.Tensor]]],
        passes: int,
        hooked: bool,
    ) -> None:
        self._reduction, self._parameter_names, self._groups, self._hooked = reduction, names, groups, hooked
        # Python hashes a tensor by identity, so two parameters with equal values are two different keys.
        self._group_of = {p: index for index, (_, members) in enumerate(groups) for p in members}
        self._watched: set[torch.Tensor] = set()
        self._trained: list[torch.Tensor] = []
        self._finishes: list[Finish] = []
        self._submitted: set[torch.Tensor] = set()
        self._sparse_axes: dict[torch.Tensor, int] = {}
        self._should_synchronize, self._synchronized = True, False
        self.backward_passes_per_step = passes
        self._follow_parameters()
        # Do this last: it sets the number of remaining backward passes for each parameter that was found above.
        self._forget()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate the gradients of this many backward passes from now on."""
        check_passes(passes)
        self.backward_passes_per_step = passes
        self._left = dict.fromkeys(self._trained, passes)

    def synchronize(self) -> None:
        """Wait until every gradient is reduced. Missing gradients are submitted as 0."""
        # A rank has no hooks if it is the only rank, or is not in the process set. It keeps its own gradients.
        if not self._hooked:
            self._synchronized = True
            return
        self._follow_parameters()
        try:
            waiting: set[int] = set()
            for p in self._trained:
                if p not in self._submitted:
                    if (group := self._group_of.get(p)) is None:
                        self._submit(p)
                    else:
                        waiting.add(group)
            for group in sorted(waiting):
                self._submit_group(group)
            # All gradients are submitted by now, so the ranks can wait in any order without blocking each other.
            for finish in self._finishes:
                finish()
        # Reset after an error too: `elastic.run` reuses this optimizer, whose next step needs a clean state.
        finally:
            self._forget()
        self._synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` skip the reduction within the block.

        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        """
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take the wrapped optimizer's step with reduced gradients; return the loss."""
        if not self._should_synchronize:
            self._synchronized = False
            return super().step(closure)  # type: ignore[misc]
        if self._synchronized and self._hooked:
            warnings.warn(
                "optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). "
                "This reduces the gradients again. Use `with optimizer.skip_synchronize(): optimizer.step()`.",
                stacklevel=2,
            )
        self._synchronized = False
        if closure is None:
            self.synchronize()
            self._synchronized = False
            return super().step()  # type: ignore[misc]
        return super().step(self._reducing(closure))  # type: ignore[misc]

    def zero_grad(self, *args: object, **kwargs: object) -> None:
        """Call the wrapped optimizer's `zero_grad` with these arguments (`set_to_none`)."""
        if self._touched:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(). This is prohibited as it can cause a race condition."
            )
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the wrapped optimizer's state, and drop reductions in flight."""
        self._forget()
        self._synchronized = False
        super().load_state_dict(state_dict)  # type: ignore[misc]

    def _reducing(self, closure: Callable[[], float]) -> Callable[[], float]:
        # Some closures only return the loss, because the gradients exist already. Other closures compute the gradients, perhaps
        # several times. In both cases, all ranks must reduce equally often, even ranks without a gradient.
        if before := self._touched:
            self.synchronize()

        def call() -> float:
            with torch.enable_grad():
                loss = closure()
            if self._touched or not before:
                self.synchronize()
            self._synchronized = False
            # L-BFGS chooses its step by the loss too. With different losses, the ranks' weights would differ.
            if self._hooked and isinstance(self, torch.optim.LBFGS):
                own = torch.as_tensor(loss, dtype=torch.float64, device="cpu").detach()
                loss = handles.synchronize(submit_allreduce([own], "closure.loss", self._reduction.how))
            return loss

        return call

    def _follow_parameters(self) -> None:
        """Update the parameters to reduce: add new and unfrozen ones, drop frozen ones."""
        for group, of_group in enumerate(self.param_groups):
            for index, p in enumerate(of_group["params"]):
                self._parameter_names.setdefault(p, f"allreduce.noname.{group}.{index}")
        self._trained = [p for p in self._parameter_names if p.requires_grad]
        for p in [p for p in self._group_of if not p.requires_grad]:
            # Take a frozen parameter out of its group: a group is sent only when all of its parameters have gradients.
            index = self._group_of.pop(p)
            name, members = self._groups[index]
            self._groups[index] = name, [member for member in members if member is not p]
        if self._hooked:
            for p in self._trained:
                if p not in self._watched:
                    self._watch(p)

    def _watch(self, p: torch.Tensor) -> None:
        self._watched.add(p)
        # Use a weak reference, so that the hook does nothing once the script has dropped the optimizer.
        self_or_none = weakref.ref(self)

        def hook(p: torch.Tensor) -> None:
            if (optimizer := self_or_none()) is not None:
                optimizer._hook(p)

        if (older := _HOOKS.get(p)) is not None:  # type: ignore[no-untyped-call]
            older.remove()
        # A post-accumulate hook runs after autograd has added the gradient to `p.grad`; a tensor hook would run before.
        _HOOKS[p] = p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _hook(self, p: torch.Tensor) -> None:
        # A parameter that was unfrozen since the last step is not in `_left` yet: all of its backward passes are still to come.
        if self._left.setdefault(p, self.backward_passes_per_step) <= 0:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before call to step(). "
                f"Increase backward_passes_per_step (now {self.backward_passes_per_step}) to accumulate gradients locally."
            )
        assert p.grad is not None
        if p.grad.requires_grad:
            raise AssertionError("the gradient needs a gradient (create_graph=True); it can't be reduced in place.")
        self._touched, self._synchronized = True, False
        self._left[p] -= 1
        if self._left[p] == 0:
            if (group := self._group_of.get(p)) is None:
                self._submit(p)
            else:
                self._complete[group].add(p)
                if len(self._complete[group]) == len(self._groups[group][1]):
                    self._submit_group(group)

    def _submit(self, p: torch.Tensor) -> None:
        self._ensure_gradient(p)
        self._submitted.add(p)
        self._finishes.append(self._reduction.begin(p, self._parameter_names[p]))

    def _submit_group(self, index: int) -> None:
        name, members = self._groups[index]
        for p in members:
            self._ensure_gradient(p)
        self._submitted.update(members)
        self._finishes.append(self._reduction.begin_group(list(members), name))

    def _ensure_gradient(self, p: torch.Tensor) -> None:
        if p.grad is None:
            # Another rank may have a gradient, so contribute zeros. Make them sparse if this rank's earlier gradient was sparse,
            # or the optimizer needs sparse gradients.
            axes = self._sparse_axes.get(p, 1 if isinstance(self, torch.optim.SparseAdam) else None)
            p.grad = torch.zeros_like(p) if axes is None else _empty_sparse(p, axes)
        elif p.grad.is_sparse:
            self._sparse_axes[p] = p.grad.sparse_dim()

    def _forget(self) -> None:
        self._finishes, self._submitted, self._touched = [], set(), False
        self._left = dict.fromkeys(self._trained, self.backward_passes_per_step)
        self._complete: list[set[torch.Tensor]] = [set() for _ in self._groups]


def check_passes(passes: int) -> None:
    """Raise ValueError unless `passes` is a valid number of backward passes."""
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step={passes!r} must be > 0, a whole number.")


def _empty_sparse(p: torch.Tensor, axes: int) -> torch.Tensor:
    """Return an empty sparse tensor with `axes` indexed dimensions."""
    indices = torch.empty(axes, 0, dtype=torch.int64, device=p.device)
    values = torch.empty(0, *p.shape[axes:], dtype=p.dtype, device=p.device)
    return torch.sparse_coo_tensor(indices, values, p.shape, check_invariants=False)


class AdasumOptimizer(GradientOptimizer):
    """A mixin that combines the ranks' steps by Adasum, for torch's optimizer classes."""

    def synchronize(self) -> None:
        """Do nothing, because with Adasum nothing is in flight before `step`."""

    def skip_synchronize(self) -> NoReturn:
        """Raise an error, because with Adasum no reduction can be skipped."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take this rank's step, combine the ranks' steps, and return the loss."""
        self._follow_parameters()
        trained = self._trained
        # Copy the parameters, because the step overwrites them. The ranks combine the differences that the step has made.
        start = [p.detach().clone() for p in trained]
        compression = self._reduction.compression
        try:
            # Bypass GradientOptimizer's own `step`, which would reduce gradients.
            loss = super(GradientOptimizer, self).step(closure)  # type: ignore[misc]
            under_way = []
            for p, before in zip(trained, start, strict=True):
                delta, ctx = compression.compress(p.detach() - before)
                under_way.append((allreduce_async_(delta, name=f"delta.{self._parameter_names[p]}", op=Adasum), ctx))
            for p, before, (handle, ctx) in zip(trained, start, under_way, strict=True):
                with torch.no_grad():
                    # Add the combined step to the values before the step, so that parameters stay equal on all ranks.
                    p.copy_(before + compression.decompress(handles.synchronize(handle), ctx))
        finally:
            self._forget()
        return loss

    def _submit(self, p: torch.Tensor) -> None:
        """Send nothing, because only `step` reduces with Adasum."""
