"""Context parallelism: the model's blocks compute a part of each sequence on each worker.

    tokens -> embedding, positions, masks -> block 0 ... block n -> head -> loss
              whole, on each worker          parts              whole, on each worker

The first block of a list takes this worker's part of its input, and the last block returns the whole sequence. Between
these two blocks only attention communicates. Outside of blocks every worker computes the whole sequence, so positions,
shifted labels and losses need no change in the user's code. Each of the n workers divides its loss by n, and gradients
are summed over the workers. So all gradients are right, inside and outside of blocks.

    2 workers, 8 positions  0 1 2 3 4 5 6 7
    worker                  0 0 1 1 1 1 0 0     a piece from the front and one from the back

In causal attention the last positions have the most work, so this split balances the work, as in torch's ring attention.

For each call of torch's scaled_dot_product_attention Paceline gathers the workers' keys and values, and torch's kernels compute
this worker's queries, as in the training of Llama 3 (https://arxiv.org/abs/2407.21783, section 3.3.2). This works on CPUs and
with any mask. torch's ring attention does not support CPU kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode

from paceline.parallel.class_swap import SharedByCopies, apply_function, give_forward
from paceline.parallel.errors import ParallelError
from paceline.parallel.experts import list_of
from paceline.parallel.mesh import World
from paceline.parallel.pytree import map_tensors, tensors_in

_LISTS = (nn.ModuleList, nn.Sequential)


def apply(model: nn.Module, world: World) -> list[str]:
    """Make blocks compute parts of each sequence. Return notes for `explain`.

    Raises:
        ParallelError: The model has no list of blocks, or a name in `ContextParallel.lists` is not such a list.
    """
    layout = world.layout
    names = _lists(model) if layout.context_lists is None else list(layout.context_lists)
    if not names:
        raise ParallelError(
            f"ContextParallel({layout.context}): {type(model).__name__} has no list of blocks (nn.ModuleList, nn.Sequential) "
            "between whose first and last its sequences could be cut. Keep its blocks in one, or use another strategy."
        )
    for name in names:
        blocks = dict(model.named_modules(remove_duplicate=False)).get(name)
        if not isinstance(blocks, _LISTS) or not len(blocks):
            raise ParallelError(
                f"ContextParallel(lists=[{name!r}]) is not a list of blocks of {type(model).__name__}. It has: "
                f"{', '.join(_lists(model)) or 'none'}."
            )
        _List(name, list(blocks), world, layout.context_dim).begin()
    return [
        f"sequences are cut between the first and the last block of {', '.join(name or 'the model' for name in names)}"
    ]


def _lists(model: nn.Module, prefix: str = "") -> list[str]:
    """Return the names of the outermost lists of blocks.

    A list of experts does not count, because each expert gets only some tokens of a sequence.
    """
    if isinstance(model, _LISTS) and len(model) and not any(isinstance(child, nn.ModuleList) for child in model):
        return [prefix]
    experts = list_of(model)
    children = {own: child for own, child in model.named_children() if child is not experts}
    return [name for own, child in children.items() for name in _lists(child, f"{prefix}.{own}" if prefix else own)]


class _List(SharedByCopies):
    """A list of blocks that compute parts of the sequence."""

    def __init__(self, name: str, blocks: list[nn.Module], world: World, dim: int) -> None:
        self._name, self._blocks, self._dim = name, blocks, dim
        self._group = world.group("context")
        self._known: dict[int, Places] = {}
        #: The positions of the current sequence that this worker computes.
        self.places: Places | None = None

    def begin(self) -> None:
        for index, block in enumerate(self._blocks):
            if isinstance(block, InParts):
                raise ParallelError(
                    f"ContextParallel(): {self._name}.{index} computes parts of sequences already. Give parallelize a model that "
                    "it was not given before, and each block one place in the lists."
                )
            if "forward" in vars(block) or isinstance(block, torch.jit.ScriptModule):
                raise ParallelError(
                    f"ContextParallel(): {self._name}.{index} has its own forward on the object, or is a script, "
                    "and cannot compute a part of a sequence. Give the unmodified module, or name the lists that "
                    "can: ContextParallel(lists=[...])."
                )
            give_forward(block, InParts, _in_parts)
            block.__dict__["_paceline_list"] = self
            # Split the input in a hook: a recomputation of the block calls no hooks, so it does not split the input twice.
            block.register_forward_pre_hook(self._taking(index), with_kwargs=True)
        self._blocks[-1].register_forward_hook(self._giving)

    def _taking(
        self, index: int
    ) -> Callable[[nn.Module, tuple[object, ...], dict[str, object]], tuple[tuple[object, ...], dict[str, object]]]:
        def take(
            block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
        ) -> tuple[tuple[object, ...], dict[str, object]]:
            first = next(iter(tensors_in((args, kwargs))), None)
            if first is None or first.dim() <= self._dim:
                seen = "no tensor" if first is None else list(first.shape)
                raise ParallelError(
                    f"ContextParallel(): {self._name}.{index} is given {seen}, and "
                    f"dimension {self._dim} of its first one is to be the sequence. Name that: ContextParallel(dim=...), or the "
                    "lists whose blocks take sequences: ContextParallel(lists=[...])."
                )
            size = first.shape[self._dim]
            if index == 0:
                self.places = self._known.get(size) or Places(size, self._group, first.device)
                self._known[size] = self.places
            elif self.places is None or size != self.places.own:
                raise ParallelError(
                    f"ContextParallel(): {self._name}.{index} is given a sequence of {size}, and this worker's part has "
                    f"{self.places.own if self.places else 'none'}. All blocks of a list have to be called one after the other."
                )
            places = self.places
            assert places is not None

            def part(tensor: Tensor) -> Tensor:
                if tensor is first:
                    return tensor if index else places.take(tensor, self._dim)
                return _part(tensor, places, self._dim)

            return map_tensors(args, part), map_tensors(kwargs, part)

        return take

    def _giving(self, block: nn.Module, args: object, output: object) -> object:
        places = self.places
        assert places is not None

        def whole(tensor: Tensor) -> Tensor:
            is_part = tensor.dim() > self._dim and tensor.shape[self._dim] == places.own
            return places.together(tensor, self._dim) if is_part and tensor.is_floating_point() else tensor

        return map_tensors(output, whole)


def _part(tensor: Tensor, places: Places, dim: int) -> Tensor:
    """Return this rank's part of the sequence in a tensor, such as a mask.

    A tensor without a sequence dimension is returned whole.
    """
    length, shape = places.length, tensor.shape
    if tensor.dim() >= 2 and shape[-1] == shape[-2] == length:
        # The mask has a row for each query and a column for each key, so take the rows of this rank's queries, and all columns.
        return places.take(tensor, tensor.dim() - 2)
    if tensor.dim() > dim and shape[dim] == length:
        return places.take(tensor, dim)
    if tensor.dim() in (1, 2) and shape[0] == length:
        return places.take(tensor, 0)
    return tensor


class InParts:
    """A mixin that marks blocks which compute a part of each sequence."""


def _in_parts(kind: type[nn.Module], block: nn.Module, /, *args: object, **kwargs: object) -> object:
    with attending_to_all(vars(block)["_paceline_list"].places):
        return kind.forward(block, *args, **kwargs)


@contextlib.contextmanager
def attending_to_all(places: Places) -> Iterator[None]:
    """Within the `with` block, let torch's attention use keys of whole sequences."""
    was_fast = torch.backends.mha.get_fastpath_enabled()
    # Disable the fused kernel that nn.MultiheadAttention uses in evaluation mode: this kernel would see only this worker's keys.
    torch.backends.mha.set_fastpath_enabled(False)
    mode = _Attending(places)
    _functional.scaled_dot_product_attention = mode.attend
    try:
        with mode:
            yield
    finally:
        _functional.scaled_dot_product_attention = _TORCHS
        torch.backends.mha.set_fastpath_enabled(was_fast)


_functional: Any = F
_TORCHS = F.scaled_dot_product_attention


class _Attending(TorchFunctionMode):
    """A torch function mode in which attention uses the keys of whole sequences."""

    def __init__(self, places: Places) -> None:
        super().__init__()
        self._places = places
        self._is_attending = False

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        return (self.attend if func is _TORCHS and not self._is_attending else func)(*args, **(kwargs or {}))

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        # Put torch's function back during the call, because with a causal bias torch's function calls itself by its public name.
        _functional.scaled_dot_product_attention, self._is_attending = _TORCHS, True
        try:
            return _attend(self._places, *args, **kwargs)
        finally:
            _functional.scaled_dot_product_attention, self._is_attending = self.attend, False


def _attend(
    places: Places,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    options["dropout_p"] = dropout_p
    if key.shape[-2] != places.own:
        # The keys belong to another sequence, such as the output of an encoder, and every worker has all of that sequence.
        if is_causal:
            raise _refusal(f"is causal over {key.shape[-2]} keys, and this worker has {places.own}")
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    key, value = _both(places, key, value)
    if attn_mask is not None:
        return F.scaled_dot_product_attention(query, key, value, _whole_mask(places, attn_mask), **options)
    if not is_causal:
        return F.scaled_dot_product_attention(query, key, value, **options)
    if query.shape[-2] != places.own:
        raise _refusal(f"is causal over {query.shape[-2]} queries, and this worker has {places.own}")
    outputs, start = [], 0
    for first, end in places.pieces:
        size = end - first
        own, start = query.narrow(-2, start, size), start + size
        # Causal attention needs no keys after this piece of the sequence. Without these keys all workers have equal work.
        keys, values = key.narrow(-2, 0, end), value.narrow(-2, 0, end)
        causal = {"attn_mask": _causal(size, end, query.device)} if first else {"is_causal": True}
        outputs.append(F.scaled_dot_product_attention(own, keys, values, **causal, **options))
    return torch.cat(outputs, -2)


def _causal(size: int, end: int, device: torch.device) -> Tensor:
    """Return the causal mask of the last `size` queries over `end` keys."""
    if device.type == "cuda":
        # On a GPU return torch's causal bias instead of a mask. Within a dispatch mode torch can't create it: return a mask.
        with contextlib.suppress(RuntimeError):
            return causal_lower_right(size, end)
    return torch.arange(end - size, end, device=device)[:, None] >= torch.arange(end, device=device)


def _both(places: Places, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    if key.shape != value.shape or key.dtype != value.dtype:
        return places.together(key, -2), places.together(value, -2)
    # Stack keys and values, so that a single message gathers both.
    keys, values = places.together(torch.stack((key, value)), -2)
    return keys, values


def _whole_mask(places: Places, mask: Tensor) -> Tensor:
    if mask.shape[-1] in (1, places.length):
        return mask
    if mask.shape[-1] == places.own and (mask.dim() < 2 or mask.shape[-2] == 1):
        # The mask is the same for all queries, and each worker has the part for its keys. So gather the parts of all workers.
        return places.together(mask, -1) if mask.is_floating_point() else places.gather(mask.int(), -1).bool()
    raise _refusal(
        f"has a mask of the shape {list(mask.shape)} for {places.length} keys. Make it before the first block, for the whole "
        "sequence, and hand it to the blocks"
    )


def _refusal(what: str) -> ParallelError:
    return ParallelError(f"ContextParallel(): attention in a block {what}.")


class Places:
    """The assignment of a sequence's positions to ranks.

    Attributes:
        length: The length of the whole sequence.
        own: The number of this rank's positions.
        pieces: This rank's two pieces, as (start, end) positions.
    """

    def __init__(self, length: int, group: dist.ProcessGroup | None, device: torch.device) -> None:
        """Split `length` positions over the ranks of `group`.

        Raises:
            ParallelError: There are fewer than two positions for each rank.
        """
        self.length, self.group = length, group
        self._ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        if length < 2 * self._ranks:
            raise ParallelError(
                f"ContextParallel({self._ranks}): a sequence of {length} places can't be cut into two pieces for each worker. "
                f"Give sequences of {2 * self._ranks} or more, or name the dimension of the sequence: ContextParallel(dim=...)."
            )
        pieces = torch.arange(length, device=device).tensor_split(2 * self._ranks)
        self._of_rank = [torch.cat([pieces[one], pieces[-1 - one]]) for one in range(self._ranks)]
        self._mine = self._of_rank[rank]
        self.own = len(self._mine)
        #: This rank's two pieces of the sequence, each as its start and end position in the whole sequence.
        self.pieces = [(int(piece[0]), int(piece[-1]) + 1) for piece in (pieces[rank], pieces[-1 - rank])]
        # Pad shorter messages, because the messages of all ranks must have the same size.
        self._most = max(map(len, self._of_rank))
        slots = torch.empty(length, dtype=torch.int64, device=device)
        for one, places in enumerate(self._of_rank):
            slots[places] = one * self._most + torch.arange(len(places), device=device)
        self._slots = slots

    def take(self, whole: Tensor, dim: int) -> Tensor:
        """Return a tensor's values at this rank's positions along `dim`.

        The backward pass gives the other positions a gradient of 0.
        """
        return whole.index_select(dim, self._mine)

    def together(self, part: Tensor, dim: int) -> Tensor:
        """Return all ranks' parts joined along `dim`. The backward pass sums ranks' gradients."""
        whole: Tensor = apply_function(_Together, part, self, dim)
        return whole

    def gather(self, part: Tensor, dim: int) -> Tensor:
        first = part.movedim(dim, 0)
        filled = first.new_zeros((self._most, *first.shape[1:]))
        filled[: self.own] = first
        everyone = first.new_empty((self._ranks * self._most, *first.shape[1:]))
        dist.all_gather_into_tensor(everyone, filled, group=self.group)
        return everyone[self._slots].movedim(0, dim)

    def scatter_sum(self, whole: Tensor, dim: int) -> Tensor:
        first = whole.movedim(dim, 0)
        everyone = first.new_zeros((self._ranks * self._most, *first.shape[1:]))
        everyone[self._slots] = first
        mine = first.new_empty((self._most, *first.shape[1:]))
        dist.reduce_scatter_tensor(mine, everyone, group=self.group)
        return mine[: self.own].movedim(0, dim)


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, places: Places, dim: int) -> Tensor:
        ctx.places, ctx.dim = places, dim
        return places.gather(part, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.places.scatter_sum(grads[0], ctx.dim), None, None
