"""Containers of many classes, taken apart and put together again."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tests.late import late

if TYPE_CHECKING:
    from torch import Tensor

torch = late("torch")


@pytest.fixture(scope="module", autouse=True)
def with_torch() -> None:
    """Import the modules that load torch before the first test: collecting the tests loads none."""
    global Whole, flatten, map_tensors, shown, signature, tensors_at, tensors_in, ONE
    from paceline.parallel.batches.batch import Whole
    from paceline.parallel.pytree import flatten, map_tensors, shown, signature, tensors_at, tensors_in

    ONE = torch.ones(2)


Pair = namedtuple("Pair", "left right")


@dataclass(frozen=True)
class Frozen:
    x: Any
    name: str = "frozen"


@dataclass
class Counted:
    x: Tensor
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        self.rows = len(self.x)


@dataclass
class Output(OrderedDict):  # type: ignore[type-arg]
    """A dict and a dataclass, whose first field is no dict of all: as some libraries have it."""

    loss: Any
    logits: Any

    def __post_init__(self) -> None:
        if isinstance(self.loss, dict):
            raise TypeError("fields are wanted")
        self["loss"], self["logits"] = self.loss, self.logits


class Encoding(UserDict):  # type: ignore[type-arg]
    """As the batches of tokenizers: a mapping that is no dict."""


class Dotted(dict):  # type: ignore[type-arg]
    """A dict whose keys are attributes too, so a missing attribute is a KeyError."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


VALUES: dict[str, Callable[[], Any]] = {
    "tensor": lambda: ONE,
    "number": lambda: 3,
    "none": lambda: None,
    "tuple": lambda: (ONE, None, (ONE, 1)),
    "empty": lambda: ((), [], {}),
    "list": lambda: [ONE, [2.0, "text"], None],
    "dict": lambda: {"b": ONE, "a": {1: ONE, None: None}},
    "ordered": lambda: OrderedDict(b=ONE, a=2),
    "default": lambda: defaultdict(list, b=[ONE], a=[]),
    "dotted": lambda: Dotted(a=ONE, b=2),
    "user": lambda: Encoding({"ids": ONE, "text": "a"}),
    "named": lambda: Pair(ONE, Pair(None, [ONE])),
    "dataclass": lambda: Frozen([ONE, None]),
    "both": lambda: Output(loss=ONE, logits=[ONE, None]),
    "size": lambda: torch.Size([2, 3]),
    "whole": lambda: Whole({"mask": ONE}),
}


@pytest.mark.parametrize("name", VALUES)
def test_flattened_nested_value_is_rebuilt_unchanged(name: str) -> None:
    value = VALUES[name]()
    leaves, structure = flatten(value)
    again = structure.rebuild(leaves)
    assert type(again) is type(value)
    assert flatten(again)[1] == structure
    assert all(one is other for one, other in zip(flatten(again)[0], leaves, strict=True))
    assert len(list(structure.paths())) == len(leaves)
    # The rebuilt container is a new object, so a change of it leaves the original unchanged.
    assert again is not value or not isinstance(value, (list, dict, UserDict))


def test_tensor_in_a_nested_value_is_found_by_its_path() -> None:
    value = {"a": [Pair(ONE, 0), Frozen((None, ONE + 1))]}
    for path, tensor in tensors_at(value):
        found: Any = value
        for kind, name in path:
            found = found[name] if kind == "item" else getattr(found, name)
        assert found is tensor
    assert [shown(path) for path, _ in tensors_at(value)] == ["['a'][0].left", "['a'][1].x[1]"]
    assert [shown(path) for path, _ in tensors_at(Pair(ONE, 0))] == ["left"]


def test_dicts_keep_key_order_and_default_factory_when_their_tensors_are_mapped() -> None:
    again = map_tensors(VALUES["default"](), lambda tensor: tensor + 1)
    assert list(again) == ["b", "a"]
    assert again["new"] == []
    assert again["b"][0].tolist() == [2.0, 2.0]


def test_computed_dataclass_field_is_recomputed() -> None:
    again = map_tensors(Counted(torch.zeros(4)), lambda tensor: tensor[:3])
    assert again.rows == 3


def test_value_marked_as_opaque_is_one_leaf() -> None:
    value = (ONE, Whole(ONE))
    assert flatten(value, lambda item: isinstance(item, Whole))[0] == [ONE, value[1]]
    assert len(tensors_in(value)) == 2


def test_signature_of_a_nested_value_depends_only_on_structure_and_plain_values() -> None:
    value = {"a": [torch.ones(1), 2], "b": (torch.zeros(2), None)}
    assert signature(value) == signature(map_tensors(value, torch.clone))
    others = [
        {"a": [torch.ones(1), 3], "b": (torch.zeros(2), None)},
        {"a": [torch.ones(2), 2], "b": (torch.zeros(2), None)},
        {"a": [torch.ones(1), 2], "b": [torch.zeros(2), None]},
        {"a": [torch.ones(1, requires_grad=True), 2], "b": (torch.zeros(2), None)},
    ]
    assert all(hash(signature(value)) != hash(signature(other)) for other in others)
    assert signature(()) != signature([])
    assert signature(None) != signature("None")
