"""The plan of layers to cut over a tensor group, found by trials, or given as a table of names.

    colwise     each rank has some of the outputs      weight in parts of its rows, bias too
    rowwise     each rank has some of the inputs       weight in parts of its columns, bias whole
    vocab       each rank has some of the words        the embedding's and the head's rows

If a rowwise layer follows colwise layers, the values between them stay in parts, and one sum gives the result. A single
colwise layer gathers its outputs, and a single rowwise layer splits its input. This is slower, but right for any code
around the layer. So a table of names can make a model slow, but never wrong.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn

from paceline.parallel.errors import ParallelError
from paceline.parallel.tensor.groups import Group, Seen, is_plain, observe
from paceline.parallel.tensor.layers import is_turned
from paceline.parallel.tensor.trial import Attribute, Verdict, try_groups


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """The cuts to make in a model.

    Attributes:
        placements: Module's name -> "colwise", "rowwise" or "vocab". Other modules stay whole on each rank.
        groups: The groups of layers between which values stay in parts, without a message.
        divided: (module, attribute) that each rank divides by the number of parts, such as a number of heads.
        changed: Layers whose output later code changes in place.
        notes: Sentences about layers that stay whole, with the reasons.
    """

    placements: Mapping[str, str]
    groups: tuple[Group, ...] = ()
    divided: tuple[Attribute, ...] = ()
    changed: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()


def find_plan(model: nn.Module, run: Callable[[], object], parts: int, ties: Sequence[tuple[str, ...]]) -> TensorPlan:
    """Find a plan that cuts all layers that can be cut.

    The plan cuts pairs of linear layers, attention by its heads, and the vocabulary's embedding and head. If a model
    has none of these, the plan cuts single linear layers that have enough outputs. `run` calls the model on a sample,
    and `ties` comes from `tied_parameters.find`.
    """
    seen = observe(model, run)
    tied = {name for names in ties for name in names}
    # Leave a group with a tied weight whole, because other layers, which are not cut with the group, use this weight too.
    free = [group for group in seen.groups if not tied & {f"{name}.weight" for name in (*group.columns, group.row)}]
    plan = _plan({}, seen, try_groups(model, run, free, parts), "stay whole")
    placements: dict[str, str] = {}
    for group in plan.groups:
        placements |= dict.fromkeys(group.columns, "colwise") | {group.row: "rowwise"}
    placements |= _vocabulary(model, seen, ties, taken=set(placements), parts=parts)
    return replace(plan, placements=placements or _lone(model, seen, tied, parts))


def plan_from_table(
    model: nn.Module, table: Mapping[str, str], run: Callable[[], object] | None, parts: int
) -> TensorPlan:
    """Make a plan from a user's table: pattern of a module's name -> placement.

    If several patterns match, the first one counts. `run` calls the model on a sample. If `run` is None, all layers
    gather their outputs.

    Raises:
        ParallelError: A pattern matches nothing, or a layer cannot be cut.
    """
    placements = _matched(model, table)
    if run is None:
        return TensorPlan(placements=placements)
    seen = observe(model, run)
    paired = [
        group
        for group in seen.groups
        if placements.get(group.row) == "rowwise" and all(placements.get(name) == "colwise" for name in group.columns)
    ]
    return _plan(placements, seen, try_groups(model, run, paired, parts), "put their values together in between")


def _plan(placements: Mapping[str, str], seen: Seen, verdicts: Sequence[Verdict], others: str) -> TensorPlan:
    """Make a plan of these placements and of the groups whose trials succeeded.

    `others` tells in the plan's notes what the layers of all other groups do, such as "stay whole".
    """
    good = [verdict for verdict in verdicts if not verdict.reason]
    return TensorPlan(
        placements=placements,
        groups=tuple(verdict.group for verdict in good),
        divided=tuple(dict.fromkeys(item for verdict in good for item in verdict.divided)),
        changed=seen.changed,
        notes=_notes(verdicts, others),
    )


def _notes(verdicts: Sequence[Verdict], what: str) -> tuple[str, ...]:
    groups: dict[str, list[Group]] = {}
    for bad in verdicts:
        if bad.reason:
            groups.setdefault(bad.reason, []).append(bad.group)
    return tuple(
        f"{', '.join(fold(name for group in own for name in group.columns))} and "
        f"{', '.join(fold(group.row for group in own))} {what}: {reason}"
        for reason, own in groups.items()
    )


def _vocabulary(
    model: nn.Module, seen: Seen, ties: Sequence[tuple[str, ...]], *, taken: set[str], parts: int
) -> dict[str, str]:
    """Return the placements of vocabulary embeddings and heads that are not in `taken`."""
    usable = {
        name: module
        for name, module in model.named_modules()
        if name in seen.calls and name not in taken and is_plain(module) and not unusual(module)
        if f"{name}.weight" not in seen.direct
    }
    embeddings = {name: module for name, module in usable.items() if isinstance(module, nn.Embedding)}
    heads = {name: module for name, module in usable.items() if isinstance(module, nn.Linear)}
    sizes = {module.num_embeddings for module in embeddings.values()} & {m.out_features for m in heads.values()}
    sizes = {size for size in sizes if size >= parts}
    found = {name for name, module in embeddings.items() if module.num_embeddings in sizes}
    found |= {name for name, module in heads.items() if module.out_features in sizes}
    # The output layer is the last linear layer with as many outputs as the embedding has rows. Others match by chance.
    last = {module.out_features: name for name, module in heads.items()}
    found = {name for name in found if name in embeddings or last[heads[name].out_features] == name}
    for names in ties:
        owners = {name.rpartition(".")[0] for name in names}
        # A tied weight is a single tensor. So cut along the vocabulary either all modules that share the weight, or none of them.
        if not owners <= found:
            found -= owners
    return {name: "vocab" for name in seen.calls if name in found and _has_pair(name, found, usable)}


def _lone(model: nn.Module, seen: Seen, tied: set[str], parts: int) -> dict[str, str]:
    return {
        name: "colwise"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and is_plain(module) and name in seen.calls and module.out_features >= parts
        if not {f"{name}.weight", f"{name}.bias"} & (tied | seen.direct)
    }


def _has_pair(name: str, chosen: set[str], usable: Mapping[str, nn.Module]) -> bool:
    sizes = {other: usable[other].get_parameter("weight").shape[0] for other in chosen}
    alike = [usable[other] for other in chosen if sizes[other] == sizes[name]]
    return len({isinstance(module, nn.Embedding) for module in alike}) == 2


def _matched(model: nn.Module, table: Mapping[str, str]) -> dict[str, str]:
    names = [name for name, _ in model.named_modules() if name]
    modules = dict(model.named_modules())
    placements: dict[str, str] = {}
    for pattern, placement in table.items():
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
            hint = f"Names like it: {', '.join(close)}." if close else f"Some of the names: {', '.join(names[:8])}."
            raise ParallelError(
                f"TensorParallel(plan): {pattern!r} is the name of no module of {type(model).__name__}. {hint}"
            )
        learning = [name for name in matching if any(p is not None for p in modules[name]._parameters.values())]
        if not learning and placement != "replicate":
            raise ParallelError(
                f"TensorParallel(plan): {pattern!r} is {placement!r}, but matches only modules without weights of their own "
                f"({', '.join(matching[:3])}). Name the linear layers in them, such as {matching[0] + '.*'!r}."
            )
        for name in (name for name in learning if name not in placements):
            if placement != "replicate":
                _check_cut(name, pattern, placement, modules[name])
            placements[name] = placement
    return {name: placement for name, placement in placements.items() if placement != "replicate"}


def _check_cut(name: str, pattern: str, placement: str, module: nn.Module) -> None:
    kind = type(module).__name__
    if not is_plain(module):
        raise ParallelError(
            f"TensorParallel(plan): {pattern!r} makes {name!r} {placement!r}, but that is a {kind}. Only nn.Linear and "
            "nn.Embedding with torch's own forward, and Conv1D of transformers, can be cut; leave the others out, or name them "
            "'replicate' before it."
        )
    if placement == "vocab" and is_turned(module):
        raise ParallelError(
            f"TensorParallel(plan): {name!r} can't be 'vocab', but that is a {kind}. Give it 'colwise' or 'rowwise'."
        )
    if isinstance(module, nn.Embedding) and (why := unusual(module)):
        raise ParallelError(
            f"TensorParallel(plan): {name!r} can't be {placement!r}: an embedding with {why} can't be cut. Name it 'replicate'."
        )


def unusual(module: object) -> str:
    """Return an embedding's option that prevents a cut, such as "sparse=True", or ""."""
    options = ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")
    values = ((option, getattr(module, option, None)) for option in options)
    # Don't test `value in (None, False)`, because a padding_idx of 0 equals False.
    return next((f"{option}={value}" for option, value in values if value is not None and value is not False), "")


def fold(names: Iterable[str]) -> list[str]:
    """Merge names that differ only in their first number, such as blocks.{0..3}.up."""
    numbers: dict[str | tuple[str, str], list[int]] = {}
    for name in names:
        match = re.search(r"(?<![^.])\d+(?![^.])", name)
        if match is None:
            numbers[name] = []
        else:
            numbers.setdefault((name[: match.start()], name[match.end() :]), []).append(int(match.group()))
    return [key if isinstance(key, str) else f"{key[0]}{_span(members)}{key[1]}" for key, members in numbers.items()]


def _span(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    return f"{{{','.join(map(str, numbers))}}}"
