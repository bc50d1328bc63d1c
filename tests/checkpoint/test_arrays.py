from __future__ import annotations

import pytest

from paceline.checkpoint.arrays import DenseArray, made
from paceline.errors import CheckpointError, UserError
from tests.late import late

np = late("numpy")
torch = late("torch")


def test_every_type_of_both_libraries_comes_back_bit_for_bit():
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
        plain = DenseArray("x", tensor, copy=False)
        found = made(plain.dtype, plain.shape, bytearray(plain.data), of="torch")
        assert found.dtype == tensor.dtype
        assert bytes(DenseArray("x", found, copy=False).data) == bytes(plain.data)
    for name in ("float64", "float16", "int32", "uint32", "bool", ">i8"):
        array = np.arange(6).reshape(2, 3).astype(name)
        plain = DenseArray("x", array, copy=False)
        assert (made(plain.dtype, plain.shape, bytearray(plain.data), of="numpy") == array).all()


@pytest.mark.parametrize("shape", [(), (0, 3), (1,)])
def test_shapes_without_a_row_are_kept(shape):
    for library, of in ((torch, "torch"), (np, "numpy")):
        plain = DenseArray("x", library.ones(shape), copy=True)
        assert tuple(made(plain.dtype, plain.shape, bytearray(plain.data), of=of).shape) == shape


def test_a_view_is_written_alone_and_as_it_looks():
    big = torch.arange(1000.0).reshape(10, 100)
    plain = DenseArray("x", big[:, 3], copy=False)
    assert plain.size == 40
    assert made("F32", [10], bytearray(plain.data), of="torch").tolist() == big[:, 3].tolist()
    marked = torch.tensor([1 + 2j]).conj()
    assert made("C64", [1], bytearray(DenseArray("x", marked, copy=False).data), of="torch").tolist() == [1 - 2j]


def test_a_copy_does_not_change_with_what_it_was_made_of():
    tensor, array = torch.ones(2), np.ones(2)
    copies = DenseArray("x", tensor, copy=True), DenseArray("y", array, copy=True)
    before = [bytes(one.data) for one in copies]
    tensor += 1
    array += 1
    assert [bytes(one.data) for one in copies] == before


def test_arrays_that_have_no_plain_values_are_refused_by_name():
    sparse = torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2), check_invariants=True)
    for array in (sparse, torch.ones(1, device="meta"), np.array(["a"]), np.array([1.0], dtype="complex128")):
        with pytest.raises(UserError, match="'x'"):
            DenseArray("x", array, copy=False)


def test_bytes_that_are_no_array_are_an_error():
    for dtype, of in (("F32", "torch"), ("BF16", "numpy"), ("NEW", "torch")):
        with pytest.raises(CheckpointError):
            made(dtype, [3], bytearray(8), of=of)
