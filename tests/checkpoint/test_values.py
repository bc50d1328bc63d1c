from __future__ import annotations

import collections
import json
import math
from typing import Any

import pytest

from paceline.checkpoint import values
from paceline.checkpoint.values import DenseArray, decode_state, encode_state
from paceline.errors import CheckpointError, UserError
from tests.late import late

#: A tensor or an array. These two have no common base type.
made: Any = values.made

np = late("numpy")
torch = late("torch")


def there_and_back(state):
    told, arrays = encode_state(state)
    return decode_state(json.loads(json.dumps(told)), lambda name, of: arrays[name])


def test_state_of_nested_python_values_is_unchanged_by_encoding_and_decoding():
    state = {
        "plain": [None, True, 1 << 70, -0.1, float("inf"), "ü", b"\x00\xff", 1 + 2j],
        "groups": ((1, "a"), {3}, frozenset({"x"}), collections.OrderedDict(b=1, a=2), collections.Counter("aab")),
        7: {("a", 1): {None: 1.5}},
        "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu")],
        # A user's dict with the keys of Paceline's own markers must be decoded as an ordinary dict.
        "$": {"$": "tensor", "at": "x"},
    }
    found = there_and_back(state)
    assert found == state
    assert [type(item) for item in found["groups"]] == [type(item) for item in state["groups"]]
    assert math.isnan(there_and_back(float("nan")))


def test_saved_arrays_get_unique_names_from_their_position_in_the_state():
    one, two = torch.ones(1), np.ones(2)
    told, arrays = encode_state({"a": {"b": one}, "a.b": two, "s": np.float64(2.5)})
    assert list(arrays) == ["a.b", "a.b#2", "s"]
    assert arrays["a.b"] is one
    found = decode_state(told, lambda name, of: arrays[name])
    assert found["a.b"] is two
    assert (found["s"], type(found["s"])) == (2.5, np.float64)


def test_models_and_optimizers_are_saved_by_their_state_dict():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    found = there_and_back({"model": model, "optimizer": [optimizer]})
    assert set(found["model"]) == {"weight", "bias"}
    assert found["optimizer"][0]["param_groups"][0]["lr"] == 1e-3


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": [1, object()]}, r"state\['a'\]\['1'\] is a builtins.object"),
        ({object(): 1}, "has the key"),
        (
            {"v": {frozenset({1}): 2}},
            r"state\['v'\] has the key frozenset.*, a frozenset, which can't be stored as a key\. Keys are texts",
        ),
    ],
)
def test_encoding_an_unsupported_value_raises_an_error_that_names_its_position_in_the_state(state, place):
    with pytest.raises(UserError, match=place):
        encode_state(state)


def test_a_state_that_contains_itself_is_refused():
    state: list[object] = []
    state.append(state)
    with pytest.raises(UserError, match="contains itself"):
        encode_state(state)


@pytest.mark.promise("checkpoint-runs-code-whoever-written")
@pytest.mark.parametrize("told", [{"$": "dtype", "of": "torch.load"}, {"$": "call"}, {}, {"$": "dict", "of": 3}])
def test_decoding_a_forged_checkpoint_state_raises_checkpoint_error(told):
    with pytest.raises(CheckpointError):
        decode_state(told, lambda name, of: None)


def test_arrays_of_every_torch_and_numpy_dtype_are_bitwise_equal_after_encoding_and_decoding():
    names = (
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "int64",
        "uint16",
        "uint8",
        "bool",
        "complex64",
        "float8_e4m3fn",
    )
    for name in names:
        tensor = torch.arange(6).reshape(2, 3).to(getattr(torch, name))
        plain = DenseArray("x", tensor)
        found = made(plain.dtype, plain.shape, bytearray(plain.data), of="torch")
        assert found.dtype == tensor.dtype
        assert bytes(DenseArray("x", found).data) == bytes(plain.data)
    for name in ("float64", "float16", "int32", "uint32", "bool", ">i8"):
        array = np.arange(6).reshape(2, 3).astype(name)
        plain = DenseArray("x", array)
        assert (made(plain.dtype, plain.shape, bytearray(plain.data), of="numpy") == array).all()


@pytest.mark.parametrize("shape", [(), (0, 3), (1,)])
def test_encoded_scalars_and_empty_arrays_keep_their_shape_when_decoded(shape):
    for library, of in ((torch, "torch"), (np, "numpy")):
        plain = DenseArray("x", library.ones(shape))
        assert tuple(made(plain.dtype, plain.shape, bytearray(plain.data), of=of).shape) == shape


def test_tensor_view_is_saved_without_its_base():
    big = torch.arange(1000.0).reshape(10, 100)
    plain = DenseArray("x", big[:, 3])
    assert plain.size == 40
    assert made("F32", [10], bytearray(plain.data), of="torch").tolist() == big[:, 3].tolist()
    marked = torch.tensor([1 + 2j]).conj()
    assert made("C64", [1], bytearray(DenseArray("x", marked).data), of="torch").tolist() == [1 - 2j]


def test_sparse_tensor_meta_tensor_or_unsupported_dtype_is_refused_and_the_error_names_the_array():
    sparse = torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2), check_invariants=True)
    for array in (sparse, torch.ones(1, device="meta"), np.array(["a"]), np.array([1.0], dtype="complex128")):
        with pytest.raises(UserError, match="'x'"):
            DenseArray("x", array)


def test_decoding_an_array_from_a_wrong_byte_count_or_unknown_dtype_raises_checkpoint_error():
    for dtype, of in (("F32", "torch"), ("BF16", "numpy"), ("NEW", "torch")):
        with pytest.raises(CheckpointError):
            made(dtype, [3], bytearray(8), of=of)
