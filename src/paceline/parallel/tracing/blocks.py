"""The modules that are blocks, computed as a whole in one stage, and those that are opened. Loaded on use: it imports torch."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

#: How deep `opened_modules` goes: 0 stops at the entries of lists, each further level opens one level of those.
LEVELS = 4


def opened_modules(model: nn.Module, *, level: int = 0, cut: Iterable[str] = ()) -> frozenset[str]:
    """Names of the modules whose forward is traced, so that the model may be cut inside of them.

    Those are `nn.Sequential` and modules that hold a list of modules, unless they are blocks (a list with several entries of
    their class), and whatever these and the modules of `cut` lie in.
    """
    found = {parent for name in cut for parent in _parents(name)}
    depths: dict[str, int] = {"": 0}
    for name, module in model.named_modules(remove_duplicate=False):
        if not name:
            continue
        owner = name.rpartition(".")[0]
        is_block = _is_block(module, model.get_submodule(owner))
        depths[name] = depths[owner] + is_block
        if isinstance(module, nn.Sequential):
            opened = depths[name] <= level + is_block
        else:
            holds_list = any(isinstance(child, _LISTS) for child in module.children())
            own = not type(module).__module__.startswith("torch.nn.") and next(module.children(), None) is not None
            opened = (holds_list or (own and level > 0)) and depths[name] <= level
        if opened:
            # The modules around it are opened too, or the trace would never come to it.
            found |= {name, *_parents(name)}
    return frozenset(found)


def _is_block(module: nn.Module, owner: nn.Module) -> bool:
    return isinstance(owner, _LISTS) and sum(type(other) is type(module) for other in owner.children()) > 1


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]
