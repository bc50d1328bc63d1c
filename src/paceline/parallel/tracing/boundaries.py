"""The positions at which a traced model can be cut, and the values that cross each cut.

A cut is before the call of a module. Values that a later part needs are sent from stage to stage. A stage receives no
values that it has or can compute itself. These are parameters and buffers, the batch (every rank of a replica has the
batch), and values that follow from the batch alone without random numbers, such as positions and masks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from paceline.parallel.errors import ParallelError
from paceline.parallel.tracing.trace import Traced


@dataclass(frozen=True, kw_only=True)
class Mark:
    """The position in a model before the `nth` call (from 0) of the module `name`."""

    name: str
    nth: int = 0

    def __str__(self) -> str:
        return self.name if not self.nth else f"{self.name} (call {self.nth + 1})"


class Boundaries:
    """The positions in a traced graph at which the model can be cut."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self._index = {node: index for index, node in enumerate(traced.order)}
        self._written = frozenset[int]().union(*(node.meta["writes"] for node in traced.order))
        self.recomputed = self._find_recomputed()
        self._last_use = {node: self._find_last_use(node) for node in traced.order}

    def marks(self) -> list[tuple[Mark, int]]:
        """Return (position, number of graph nodes before it) for each possible cut."""
        seen: dict[str, int] = {}
        marks: list[tuple[Mark, int]] = []
        for name, index in self.traced.entries:
            nth = seen[name] = seen.get(name, -1) + 1
            if name not in self.traced.leaves or index == 0 or (marks and marks[-1][1] == index):
                continue
            if self._has_call_before(index) and self.obstacle(index) is None:
                marks.append((Mark(name=name, nth=nth), index))
        return marks

    def find(self, mark: Mark) -> int:
        """Return how many graph nodes come before the mark's module call.

        Raises:
            ParallelError: The trace does not contain the mark, or the model cannot be cut there.
        """
        places = [index for name, index in self.traced.entries if name == mark.name]
        if not places:
            known = list(dict.fromkeys(name for name, _ in self.traced.entries))
            raise ParallelError(
                f"cut={mark.name!r}: the model's forward calls no module of that name. It calls {_listed(known)}."
            )
        if mark.nth >= len(places):
            raise ParallelError(
                f"the model was cut before call {mark.nth + 1} of {mark.name!r}, but for this batch, or in this mode, it calls "
                f"it {len(places)} times. Cut at a module that is called each time: PipelineParallel(cut=[...])."
            )
        index = places[mark.nth]
        obstacle = self.obstacle(index)
        if not self._has_call_before(index):
            obstacle = "nothing is computed before it, so that the stage before would be empty"
        if obstacle is not None:
            raise ParallelError(f"cut={mark.name!r}: the model can't be cut there: {obstacle}. Choose another module.")
        return index

    def live(self, index: int) -> tuple[fx.Node, ...]:
        """Return the graph nodes whose values cross a cut before node number `index`."""
        return tuple(
            node
            for node in self.traced.order[:index]
            if node.op != "get_attr" and node not in self.recomputed and self._last_use[node] >= index
        )

    def obstacle(self, index: int) -> str | None:
        """Return why the model cannot be cut before graph node number `index`, or None."""
        live = self.live(index)
        for node in live:
            if "shape" not in node.meta:
                return f"what {node.name} returns is needed after it and is not a tensor"
            if node.meta.get("sparse"):
                return f"{node.name} is not a dense tensor"
            if "learns_from" in node.meta and self._index[node.meta["learns_from"]] >= index:
                return f"{node.name} is filled in after it with something that has a gradient"
        # Refuse a cut between two uses of a buffer that forward changes: each stage would change only its own copy of the buffer.
        before = frozenset[int]().union(*(node.meta["touches"] for node in self.traced.order[:index]))
        after = frozenset[int]().union(*(node.meta["touches"] for node in self.traced.order[index:]))
        shared = before & after & self._written & self._fixed_storages()
        if shared:
            user = next(node for node in self.traced.order[index:] if node.meta["touches"] & shared)
            where = user.meta["module"] or user.name
            return f"a buffer or an input that the forward pass changes is used before it and in {where}"
        # Refuse a cut that separates two views of a storage: a change of one view would not reach the other view's stage.
        later = frozenset[int]().union(*(node.meta["writes"] for node in self.traced.order[index:]))
        storages = [node.meta["storage"] for node in live if node.meta["storage"] in later]
        if len(storages) != len(set(storages)):
            return "two views of one tensor, which is changed in place after it, are needed on both sides"
        return None

    def written_after(self, node: fx.Node, index: int) -> bool:
        """Return whether graph node number `index` or a later one changes `node`'s value in place."""
        return any(node.meta["storage"] in later.meta["writes"] for later in self.traced.order[index:])

    def _find_recomputed(self) -> frozenset[fx.Node]:
        """Return the graph nodes that each stage can compute from the batch alone."""
        own: set[fx.Node] = set(self.traced.inputs)
        for node in self.traced.order:
            constant = node.op == "get_attr" and str(node.target) in self.traced.constants
            if not constant and (node.op not in ("call_function", "call_method") or node.meta["random"]):
                continue
            # Never compute a value with a gradient in two stages: the parameters behind it would get their gradient twice.
            if node.meta.get("requires_grad") or node.meta["touches"] & self._written:
                continue
            if all(given in own for given in node.all_input_nodes):
                own.add(node)
        return frozenset(own)

    def _find_last_use(self, node: fx.Node) -> int:
        end = len(self.traced.order)
        return max((self._index.get(user, end) for user in node.users), default=-1)

    def _has_call_before(self, index: int) -> bool:
        return any(node.op != "get_attr" and node not in self.recomputed for node in self.traced.order[:index])

    def _fixed_storages(self) -> frozenset[int]:
        state = frozenset[int]().union(*(node.meta["state"] for node in self.traced.order))
        return state | {node.meta["storage"] for node in self.traced.inputs}


def _listed(names: list[str], limit: int = 24) -> str:
    shown = ", ".join(map(repr, names[:limit]))
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
