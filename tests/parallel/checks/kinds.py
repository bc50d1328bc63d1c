"""The kinds of model that people train, on every layout: equal to one process, or refused with a sentence before the first step.

All of them in `make proof`; in `make test` each layout has those that differ in its possible errors.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from tests.parallel.kinds.kind import LAYOUTS, RARE, Kind, alone, judged
from tests.parallel.kinds.plain import KINDS
from tests.parallel.kinds.published import PUBLISHED
from tests.parallel.world import Ranks

SIZES = (2, 4)

#: Layout -> kinds of models that `make test` trains. Only `make proof` trains the other kinds.
SHORT = {
    "data": ("keeps-state", "loss-reads-aux", "lookup-sparse", "own-loss-dict", "python-random"),
    "shard": (
        "gru",
        "loss-reads-all-parameters",
        "gradients",
        "scripted",
        "muon-wide",
    ),
    "pipe": (
        *("packed", "packed-in-blocks", "own-gradient", "in-place", "checkpointed-reentrant", "vmapped"),
        *(
            "own-loss-tuple",
            "loss-reads-aux",
            "loss-learns",
            "numpy-random",
        ),
        *("compiled", "experts"),
    ),
    "tensor": (
        *(
            "loss-reads-aux",
            "loss-reads-parameter",
            "compiled",
            "numpy-random",
        ),
        *("weight-norm-old", "own-loss-dataclass"),
    ),
    "shard@pipe": ("loss-reads-numbers",),
    "data@tensor": ("own-loss-sum",),
    "context": ("transformer", "tower", "conv-batch"),
    "expert": ("experts", "tower"),
    "data@expert": ("mixture",),
}


def check_models_of_torch_modules_equal_one_process_or_are_refused(ranks: Ranks) -> None:
    whole = SHORT | {"expert": ("experts", "mixture", "tower")}
    whole |= {name: tuple(KINDS) for name in LAYOUTS if name not in RARE}
    assert_right(ranks, KINDS, ranks.cells(SHORT, whole))


#: Layout -> published architectures that `make test` trains with this layout.
SHORT_PUBLISHED = {
    "data": ("realnvp", "dlrm"),
    "shard": ("pinn", "memory-network", "bert-two-tasks"),
    "pipe": ("unet++", "llama-by-hand", "neural-ode"),
    "tensor": ("switch", "reversible"),
}


def check_published_architectures_equal_one_process_or_are_refused(ranks: Ranks, sizes: Any = (2,)) -> None:
    whole = {name: tuple(PUBLISHED) for name in SHORT_PUBLISHED}
    assert_right(ranks, PUBLISHED, ranks.cells(SHORT_PUBLISHED, whole))


def assert_right(ranks: Ranks, kinds: Mapping[str, Kind], of_layout: Mapping[str, Iterable[str]]) -> None:
    """of_layout: layout -> the kinds that it has."""
    chosen = {name: set(of_layout.get(name, ())) for name in LAYOUTS}
    # A misspelled name would leave out a kind of model without any error, so check that each name exists.
    assert not set().union(*chosen.values()) - set(kinds)
    assert set(of_layout) <= set(LAYOUTS)
    wrong = []
    for name, kind in kinds.items():
        layouts = [layout for layout, (size, _) in LAYOUTS.items() if size == ranks.size and name in chosen[layout]]
        with warnings.catch_warnings():
            # Ignore warnings that libraries cause about their own functions.
            warnings.simplefilter("ignore")
            is_trained = any(kind.refusal(layout) is None for layout in layouts)
            one = alone(kind) if is_trained else None
            wrong += [f"{name} on {layout}: {text}" for layout in layouts if (text := judged(kind, layout, one))]
    assert not wrong, "\n".join(wrong)
