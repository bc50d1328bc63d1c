"""Messages between ranks consist of plain values only."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tests.late import late

torch = late("torch")


@pytest.fixture(scope="module", autouse=True)
def with_torch() -> None:
    """Import the modules that load torch before the first test: collecting the tests loads none."""
    global Parts, Whole, filled, packed, sendable, unpacked
    from paceline.parallel.batches.batch import Parts, Whole
    from paceline.parallel.batches.rows import filled, sendable
    from paceline.parallel.exchange import packed, unpacked


@dataclasses.dataclass(frozen=True)
class Cut:
    name: str
    at: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Other:
    name: str


PLAIN: list[Any] = [
    *(None, True, 3, -(2**70), 2.5, "ü", b"\0\xff", 1 + 2j, [], (), {}, set()),
    [1, (2, (3,)), {"a": [None]}],
    {"$": "tensor", "of": [1]},
    {1: "one", (2, "two"): 2.0, None: []},
    OrderedDict(b=1, a=2),
    Counter("aab"),
    # A set with one member: its repr is a test's name, and the order of several members depends on the hash seed.
    frozenset({(1, "x")}),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_value_is_equal_after_encoding_and_decoding(value: Any) -> None:
    _assert_comes_as_it_was(value)


@pytest.mark.parametrize("written", ["torch.Size([2, 3])", "torch.bfloat16", "torch.device('cuda', 1)"])
def test_torch_size_dtype_and_device_are_equal_after_encoding_and_decoding(written: str) -> None:
    _assert_comes_as_it_was(eval(written))


def _assert_comes_as_it_was(value: Any) -> None:
    found = unpacked(packed(value))
    assert found == value
    assert type(found) is type(value)


def test_infinities_and_nan_survive_encoding_and_numpy_numbers_become_python_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    found = unpacked(packed([math.inf, -math.inf, math.nan, numpy.int64(3), numpy.float32(0.5)]))
    assert found[:2] == [math.inf, -math.inf]
    assert math.isnan(found[2])
    assert found[3:] == [3, 0.5]
    assert [type(item) for item in found[3:]] == [int, float]


@pytest.mark.parametrize("name", ["float64", "bfloat16", "int8", "bool", "complex64"])
def test_tensors_are_equal_with_their_dtypes_after_encoding_and_decoding(name: str) -> None:
    dtype = getattr(torch, name)
    tensors = [torch.arange(6).reshape(2, 3).to(dtype).T, torch.ones((), dtype=dtype), torch.empty(0, 4, dtype=dtype)]
    # `odd` is an odd number of bytes before the tensors.
    found = unpacked(packed({"odd": torch.ones(3, dtype=torch.uint8), "own": tensors}))["own"]
    for one, other in zip(tensors, found, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_dataclass_is_encoded_and_decoded_only_if_its_class_is_expected() -> None:
    value = ([Cut("a", (1, 2))], Cut("b", ()))
    assert unpacked(packed(value, (Cut,)), (Cut,)) == value
    with pytest.raises(TypeError, match="Cut"):
        packed(value)
    with pytest.raises(ValueError, match="Cut"):
        unpacked(packed(value, (Cut,)), (Other,))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (object, "object"),
        (lambda: test_encoding_a_value_of_an_unsupported_type_raises_and_the_error_names_the_type, "function"),
        (lambda: Other("x"), "Other"),
        (lambda: torch.ones(2).to_sparse(), "Tensor"),
        (lambda: [{"a": {1: object}}], "type"),
    ],
    ids=["object", "function", "dataclass", "sparse tensor", "type inside"],
)
def test_encoding_a_value_of_an_unsupported_type_raises_and_the_error_names_the_type(
    make: Callable[[], Any], kind: str
) -> None:
    with pytest.raises(TypeError, match=kind):
        packed(make())


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('a stranger has run code')",)


def _message(told: Any) -> bytes:
    text = json.dumps(told).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.promise("other-pickles-opened-table")
@pytest.mark.parametrize(
    "data",
    [
        b"\0",
        b"\xff" * 40,
        pickle.dumps(Evil()),
        _message([])[:-1],
        _message({"$": "eval", "of": "1"}),
        _message({"$": "dtype", "of": "load"}),
        _message({"$": "device", "of": "nowhere"}),
        _message({"$": "tensor", "of": ["float32", [4]]}),
        _message({"$": "tensor", "of": ["hub", [0]]}),
        _message({"$": "Evil", "of": {}}),
    ],
)
def test_malformed_message_is_refused_without_running_code(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        unpacked(torch.frombuffer(bytearray(data), dtype=torch.uint8))


class Encoding(dict[str, Any]):
    """A mapping of somebody's own."""


class Pair(NamedTuple):
    left: Any
    right: Any


def test_values_that_cannot_be_sent_are_taken_from_the_local_batch_by_the_receiving_rank() -> None:
    own = object()

    def piece(rows: int, text: str) -> Parts:
        encoding = Encoding(ids=torch.full((rows, 2), rows), text=[text] * rows, mask=Whole(torch.ones(2)))
        return Parts((encoding, Pair(torch.ones(rows), own)), {"k": rows}, [torch.zeros(rows), None])

    theirs = unpacked(packed(sendable(piece(3, "c"))))
    found = filled(piece(2, "b"), theirs)
    encoding, pair = found.args
    assert type(encoding) is Encoding
    assert encoding["text"] == ["c"] * 3
    assert encoding["ids"].tolist() == [[3, 3]] * 3
    assert encoding["mask"].value.tolist() == [1, 1]
    assert type(pair) is Pair
    assert pair.right is own
    assert len(pair.left) == 3
    assert found.kwargs == {"k": 3}
    assert found.target[0].shape == (3,)
    assert found.target[1] is None
