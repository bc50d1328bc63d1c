"""A recorder of a model's calls outside of its blocks, as a torch.fx graph.

torch.fx's own tracer passes proxies instead of tensors. Proxies fail at `assert time <= limit`, `x.dim() == 3`,
torch.arange(time), or any check for a tensor. This recorder passes fake tensors (shapes without values), so plain
Python runs. Each call of a torch function or a block is recorded:

    forward runs -> torch function?   a node `call_function`
                 -> a block?          a node `call_module`; the calls inside are not recorded
                 -> an opened module? the calls in its forward are recorded in the same way

A call of a custom autograd.Function is one node. `torch.utils.checkpoint` around a block is recorded as a call of the
block alone, which has the same results and keeps its activations. Inside a block both work as in plain PyTorch.

Code that depends on a tensor's values, such as `.item()`, cannot be recorded; the error of `trace` names its line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from paceline.parallel.deterministic_rng import generators_kept
from paceline.parallel.pytree import Container, flatten, map_tensors, open_container, signature, tensors_at, tensors_in
from paceline.parallel.recompute import checkpoints_opened
from paceline.parallel.tracing.fake_model import fake_like
from paceline.parallel.tracing.fingerprint import Fingerprint
from paceline.parallel.tracing.source import Line, unwatched, users_line
from paceline.torch_private import checkpoints_inputs, lost_arguments

#: Functions that read a tensor's values. The model's fake copy refuses such a function, but the real model would not.
READS_VALUES = frozenset(
    {
        *("__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__", "__array__", "__format__"),
        *("item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "nonzero", "unique", "masked_select"),
    }
)
_RANDOM = ("rand", "dropout", "normal", "bernoulli", "multinomial", "poisson", "uniform_", "exponential_", "gumbel")
_PLAIN = (
    *(int, float, bool, complex, str, type(None), type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


_Args = tuple[Any, ...]
_Options = dict[str, object]


class CannotRecordError(Exception):
    """The model's code outside blocks does something that a graph cannot contain."""

    def __init__(self, message: str, line: Line | None = None) -> None:
        super().__init__(message)
        self.line = line


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Ran:
    """A block's result on fake tensors, reused for calls with the same arguments.

    `state_writes` has the indices of the buffers that the block changes in place.
    """

    result: object
    state_writes: tuple[int, ...]


#: (block's name, arguments, whether gradients are on, modes of its modules) -> the block's result.
Ran = dict[tuple[str, Hashable, bool, tuple[bool, ...]], _Ran]


class GraphRecorder(TorchFunctionMode):
    """A torch function mode that records a model's calls as a torch.fx graph.

    Attributes:
        order: The nodes in the order of the calls.
        entries: (module's name, number of nodes before its call) for each call.
        names: Module's id -> name.
        state: Id of a parameter or buffer -> name.
        plain: Id of a fake tensor -> the real tensor, which is neither parameter nor buffer.
        ran: Earlier results of blocks on fake tensors; new ones are added.

    Keys of a node's `meta`: `shape`, `dtype`, `requires_grad` and `storage` of its result, if that is a tensor; `touches` and
    `writes`, the storages that the call uses and changes; `state`, the storages of a block's own tensors; `no_grad`, `random`
    and `line` of the call; and `module`, the name of the module that makes the call.
    """

    def __init__(
        self,
        *,
        names: Mapping[int, str],
        state: Mapping[int, str],
        plain: Mapping[int, Tensor],
        opened: Callable[[str], bool],
        ran: Ran | None = None,
    ) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.order: list[fx.Node] = []
        self.entries: list[tuple[str, int]] = []
        self.constants: dict[str, object] = {}
        self.leaves: set[str] = set()
        self.inside: str | None = None
        self._names = names
        self._state = state
        self._plain = plain
        self._opened = opened
        self._stack: list[str] = [""]
        self._nodes: dict[int, tuple[Tensor, fx.Node]] = {}
        self._autocast = _autocast_state()
        self._paused = False
        self._unseen = checkpoints_inputs()
        self._ran = ran
        self._handed: list[tuple[object, Hashable, Line | None]] = []

    @property
    def opened_now(self) -> str:
        """The name of the innermost running module whose forward is recorded, or ""."""
        return self._stack[-1]

    @property
    def is_outer(self) -> bool:
        """Whether code outside of the model's blocks runs now."""
        return self.inside is None and not self._paused

    def add_input(self, name: str, tensor: Tensor) -> fx.Node:
        """Add a tensor of the batch to the graph. Return its placeholder node."""
        node = self.graph.placeholder(name)
        self._know(node, tensor)
        return node

    def finish(self, output: object) -> fx.Node:
        """Add the forward's output to the graph. Return the output node."""
        for value, content, line in self._handed:
            if Fingerprint().of(value) != content:
                raise CannotRecordError(
                    f"the {type(value).__name__} that is passed on there is changed later in the same call; a "
                    "stage would only see its final state. Make a new one for each call",
                    line,
                )
        node: fx.Node = self.graph.output(self._argument(output))
        return node

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: _Args = (), kwargs: _Options | None = None
    ) -> object:
        kwargs = (kwargs or {}) | lost_arguments(func)
        if not self.is_outer:
            return func(*args, **kwargs)
        match getattr(func, "__name__", ""):
            # Refuse functions that read a tensor's values: the values of this batch would become constants of the graph.
            case name if name in READS_VALUES:
                raise CannotRecordError(f"`{name.strip('_')}` asks for a tensor's values")
            case "__set__":
                raise CannotRecordError(f"it sets `{func.__self__.__name__}` of a tensor")
            case "requires_grad_":
                raise CannotRecordError(
                    "`requires_grad_` begins a graph of its own there, which would reach over several stages; compute with it, "
                    "and its gradient, inside of a block"
                )
            case name:
                return self._record(func, name, args, kwargs)

    def call_module(self, original: Callable[..., object], module: nn.Module, args: _Args, kwargs: _Options) -> object:
        """Run `original(module, *args, **kwargs)`. If the module is a block, record a single call."""
        name = self._names.get(id(module))
        if self.inside is not None or name is None:
            return original(module, *args, **kwargs)
        self.entries.append((name, len(self.order)))
        if self._opened(name):
            self._stack.append(name)
            result = original(module, *args, **kwargs)
            # Don't pop the name in a `finally`: after an error, the stack must tell in which module the trace failed.
            self._stack.pop()
            return result
        # Don't record operations of the recorder itself.
        self._paused = True
        own = list(module.buffers())
        node = self._node("call_module", name, args, kwargs)
        # Don't reset `inside` in a `finally`: after an error, `inside` must name the block that failed.
        self.inside = name
        result, writes = self._run(original, module, name, own, args, kwargs)
        self.inside = None
        self.leaves.add(name)
        node.meta["module"] = name
        node.meta["state"] = frozenset(_storage(tensor) for tensor in own)
        node.meta["touches"] |= node.meta["state"]
        node.meta["writes"] = frozenset(writes)
        self._give_out(node, result)
        self._paused = False
        return result

    def _run(
        self,
        original: Callable[..., object],
        module: nn.Module,
        name: str,
        own: list[Tensor],
        args: _Args,
        kwargs: _Options,
    ) -> tuple[object, set[int]]:
        """Run a block with the buffers `own`. Return (result, ids of changed storages)."""
        given = tensors_in((args, kwargs))
        key = None
        if self._ran is not None and _is_data((args, kwargs)):
            modes = tuple(part.training for part in module.modules())
            key = (name, signature((args, kwargs)), torch.is_grad_enabled(), modes)
            if (known := self._ran.get(key)) is not None:
                return map_tensors(known.result, fake_like), {_storage(own[index]) for index in known.state_writes}
        # A tensor's `_version` counts in-place changes of the tensor and of all its views. So a higher count shows a write.
        before = [tensor._version for tensor in own]
        versions = [tensor._version for tensor in given]
        contents = [Fingerprint().of(value) for value in (*args, *kwargs.values())]
        # Restore the random generators after this call, because the block draws its random numbers later, when its stage runs.
        with generators_kept(), unwatched():
            result = original(module, *args, **kwargs)
        for value, content in zip((*args, *kwargs.values()), contents, strict=True):
            if Fingerprint().of(value) != content:
                self.inside = None
                raise CannotRecordError(_changes(name, value))
        writes = _changed(own, before)
        into_given = _changed(given, versions)
        if self._ran is not None and key is not None and not into_given and _is_data(result):
            storages = [_storage(tensor) for tensor in tensors_in(result)]
            is_new = len(set(storages)) == len(storages)
            if is_new and not {*storages} & {_storage(tensor) for tensor in (*given, *own, *module.parameters())}:
                places = tuple(index for index, tensor in enumerate(own) if _storage(tensor) in writes)
                self._ran[key] = _Ran(result=map_tensors(result, fake_like), state_writes=places)
        return result, writes | into_given

    def call_function(self, original: Callable[..., object], kind: type, args: _Args, kwargs: _Options) -> object:
        """Run `original`, the `apply` of autograd function `kind`, and record it as one call."""
        if not self.is_outer or kind in self._unseen:
            return original(*args, **kwargs)
        self._paused = True
        try:
            return self._record(_as_function(kind, original), kind.__name__, args, kwargs)
        finally:
            self._paused = False

    def _record(self, func: Any, name: str, args: _Args, kwargs: _Options) -> object:
        inputs = tensors_in((args, kwargs))
        versions = [tensor._version for tensor in inputs]
        result = func(*args, **kwargs)
        written = frozenset(_changed(inputs, versions))
        if not written and not tensors_in(result):
            return result  # a size or a dtype, for example, is a constant in the graph
        # Find tensors that get a gradient because the operation wrote a tensor with a gradient into them.
        learn = [
            known
            for tensor, known in (self._nodes.values() if written else ())
            if tensor.requires_grad and not known.meta["requires_grad"] and known.meta["storage"] in written
        ]
        for known in learn:
            known.meta["requires_grad"] = True
        method = _methods().get(func)
        match args:
            case (owner, *_) if name == "__get__":
                node = self._node("call_function", getattr, (owner, func.__self__.__name__), {})
            case (Tensor(), *_) if method is not None:
                node = self._node("call_method", method, args, kwargs)
            case _:
                node = self._node("call_function", func, args, kwargs)
        node.meta["writes"] = written
        node.meta["random"] = any(word in name for word in _RANDOM)
        for known in learn:
            known.meta["learns_from"] = node
        self._give_out(node, result)
        return result

    def _node(self, kind: str, target: Callable[..., object] | str, args: _Args, kwargs: _Options) -> fx.Node:
        if _autocast_state() != self._autocast:
            raise CannotRecordError("it changes autocast; give precision='bf16' to parallelize, or do so in a block")
        node = self.graph.create_node(kind, target, self._argument(tuple(args)), self._argument(dict(kwargs)))
        self._append(node)
        node.meta["touches"] = set(map(_storage, tensors_in((args, kwargs))))
        return node

    def _append(self, node: fx.Node) -> None:
        node.meta |= {"writes": frozenset(), "state": frozenset(), "touches": set(), "random": False}
        node.meta["no_grad"] = not torch.is_grad_enabled()
        node.meta["module"] = self._stack[-1]
        node.meta["line"] = users_line()
        self.order.append(node)

    def _give_out(self, node: fx.Node, result: object) -> None:
        """Remember the graph node of each tensor in a call's result."""
        # If the result is a tensor and no container, its path is empty, and `part` remains `node`.
        for path, tensor in tensors_at(result):
            part = node
            for kind, key in path:
                arguments: tuple[Any, ...] = part, key
                part = self.graph.call_function(_take_item if kind == "item" else getattr, arguments)
                self._append(part)
            self._know(part, tensor)

    def _know(self, node: fx.Node, tensor: Tensor) -> None:
        """Remember a tensor's graph node, and describe the tensor in the node's meta."""
        self._nodes[id(tensor)] = tensor, node
        node.meta.setdefault("touches", set()).add(_storage(tensor))
        node.meta |= {
            "shape": tuple(tensor.shape),
            "dtype": tensor.dtype,
            "requires_grad": tensor.requires_grad,
            "storage": _storage(tensor),
        }

    def _argument(self, value: object) -> Any:
        kind = type(value)
        match value:
            case Tensor():
                return self._find(value)
            case tuple() if kind in (tuple, torch.Size):
                return tuple(map(self._argument, value))
            case list() if kind is list:
                return [self._argument(item) for item in value]
            case dict() if kind is dict and all(isinstance(key, str) for key in value):
                return {key: self._argument(item) for key, item in value.items()}
            case slice():
                return slice(*map(self._argument, (value.start, value.stop, value.step)))
            case _ if isinstance(value, _PLAIN):
                return value
        opened = open_container(value)
        if opened is None or not tensors_in(value):
            return self._constant(value)
        # Add a call to the graph that creates a container (a named tuple, a dataclass or a special dict) from its items.
        container, items = opened
        node = self.graph.call_function(_make, (self._constant(container), list(map(self._argument, items))))
        self._append(node)
        return node

    def _find(self, tensor: Tensor) -> fx.Node:
        if (known := self._nodes.get(id(tensor))) is not None:
            # If exactly one of the tensor and its recorded node has a gradient, the graph's gradient would be wrong.
            if known[1].meta["requires_grad"] != tensor.requires_grad:
                raise CannotRecordError(
                    "it has a gradient that the calls which made it don't explain, or has lost one (a call below torch's own "
                    "functions)"
                )
            return known[1]
        name = self._state.get(id(tensor))
        if name is None:
            if id(tensor) not in self._plain and type(tensor) not in (Tensor, nn.Parameter):
                raise CannotRecordError(
                    "it uses a tensor that no torch function or block returned (kept from an earlier call, or one of "
                    "torch.func's)"
                )
            return self._constant(self._plain.get(id(tensor), tensor), tensor)
        node = self.graph.get_attr(name)
        self._append(node)
        self._know(node, tensor)
        node.meta["state"] = frozenset(node.meta["touches"])
        return node

    def _constant(self, value: object, tensor: Tensor | None = None) -> fx.Node:
        """Add a graph node for a constant and, if given, its fake `tensor`."""
        name = f"_paceline_constant_{len(self.constants)}"
        self.constants[name] = value
        node = self.graph.get_attr(name)
        self._append(node)
        if tensor is None:
            self._handed.append((value, Fingerprint().of(value), users_line()))
        else:
            self._know(node, tensor)
        return node


@contextlib.contextmanager
def recording(recorder: GraphRecorder) -> Iterator[None]:
    """Within the `with` block, send all module calls through the recorder."""
    original: Any = nn.Module.__call__
    plain_apply: Any = vars(torch.autograd.Function)["apply"]

    def call(module: nn.Module, *args: object, **kwargs: object) -> object:
        return recorder.call_module(original, module, args, kwargs)

    def apply(kind: type, /, *args: object, **kwargs: object) -> object:
        return recorder.call_function(plain_apply.__get__(None, kind), kind, args, kwargs)

    # Intercept `__call__`, which runs the hooks and the `forward` of every module. As a class attribute it also intercepts
    # modules of other threads, but these have no name in the recorder.
    nn.Module.__call__ = call  # type: ignore[method-assign]
    # Intercept `apply`, because the forward of a custom function runs below the torch functions that the recorder sees.
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        with recorder, checkpoints_opened():
            yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]
        torch.autograd.Function.apply = plain_apply  # type: ignore[method-assign]


def _as_function(kind: type, apply: Callable[..., object]) -> Callable[..., object]:
    def call(*args: object, **kwargs: object) -> object:
        return apply(*args, **kwargs)

    call.__module__, call.__name__, call.__qualname__ = kind.__module__, kind.__name__, kind.__qualname__
    return call


@functools.cache
def _methods() -> dict[object, str]:
    methods: dict[object, str] = {}
    for name in dir(Tensor):
        method = getattr(Tensor, name, None)
        # If a method has several names, take the one in its `__name__`.
        if callable(method) and (method not in methods or method.__name__ == name):
            methods[method] = name
    return methods


def _is_data(value: object) -> bool:
    leaves, _ = flatten(value, lambda item: not isinstance(item, (tuple, list)) and type(item) is not dict)
    return all(isinstance(leaf, (Tensor, *_PLAIN)) for leaf in leaves)


def _changes(name: str, value: object) -> str:
    kind = type(value).__name__
    text = (
        f"{name} changes the {kind} that it is given, and in a pipeline other stages, which are other processes, would not "
        "see that; let the block return tensors instead"
    )
    if "cache" in kind.lower():
        return (
            f"{text}. It is a cache of keys and values, which training doesn't need: set model.config.use_cache = False"
        )
    return text


def _take_item(container: Any, key: Hashable) -> object:
    return container[key]


def _make(container: Container, items: list[object]) -> object:
    return container.make(items)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _changed(tensors: list[Tensor], versions: list[int]) -> set[int]:
    pairs = zip(tensors, versions, strict=True)
    return {_storage(tensor) for tensor, version in pairs if tensor._version != version}


def _autocast_state() -> tuple[object, ...]:
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda"))
