"""The names under which an optimizer's parameters meet those of other ranks, and the groups in which they travel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from paceline.compat.horovod.common.arguments import check_groups, in_parts
from paceline.compat.horovod.common.process_sets import ProcessSet, checked_members
from paceline.compat.horovod.torch.functions import broadcast_object


def parameter_names(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Parameter -> name, in the order of the optimizer's groups.

    Raises:
        ValueError: what is given are no pairs; a name stands twice; a parameter has none.
    """
    params = [
        (group, index, p)
        for group, members in enumerate(optimizer.param_groups)
        for index, p in enumerate(members["params"])
    ]
    given = list(named or [])
    if not given:
        return {p: f"allreduce.noname.{group}.{index}" for group, index, p in params}
    if any(not isinstance(item, tuple) or len(item) != 2 for item in given):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by model.named_parameters()."
        )
    twice = sorted(name for name, count in Counter(name for name, _ in given).items() if count > 1)
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    known = {p: name for name, p in given}
    missing = [f"{index} of group {group}" for group, index, p in params if p not in known]
    if missing:
        raise ValueError(
            "named_parameters was specified, but one or more model parameters were not named: number "
            f"{', '.join(missing)}. Python object ids differ between ranks, so each of them needs a name."
        )
    return {p: known[p] for _, _, p in params}


def in_groups(
    names: dict[torch.Tensor, str],
    groups: int | Sequence[Sequence[torch.Tensor]] | None,
    process_set: ProcessSet,
) -> list[tuple[str, list[torch.Tensor]]]:
    """(name, parameters) of each group; a parameter that stands in none is reduced alone.

    groups: a number of groups to make of all parameters, in the order that the first rank has; or lists of them, of which
        those that are not the optimizer's are left out.

    Raises:
        ValueError: a negative number, something else, or a parameter that stands twice.
    """
    trained = {p: name for p, name in names.items() if p.requires_grad}
    if groups is None or groups == 0:
        return []
    check_groups(groups, "parameters")
    if isinstance(groups, int):
        by_name = {name: p for p, name in trained.items()}
        # Another rank may list its parameters in another order, and the members of a group meet by their place.
        order = broadcast_object(list(by_name), checked_members(process_set)[0], process_set=process_set)
        lists = [[by_name[name] for name in part] for part in in_parts(order, groups)]
    else:
        lists = [list(members) for members in groups]
    seen: set[int] = set()
    for members in lists:
        for p in members:
            if not isinstance(p, torch.Tensor):
                raise ValueError(f"groups names {p!r}, which is no parameter. Give lists of the model's parameters.")
            if id(p) in seen:
                known = names.get(p, "of another optimizer")
                raise ValueError(f"groups names the parameter {known!r} twice; each belongs to one group at most.")
            seen.add(id(p))
    # A frozen parameter would let its group wait for a gradient that never comes.
    kept = ([p for p in members if p in trained] for members in lists)
    return [(f"group.{names[members[0]]}", members) for members in kept if members]
