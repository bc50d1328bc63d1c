"""The parts of a checkpoint: which rank writes which box, and boxes of one layout read by another."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from paceline.checkpoint.api import write_file
from paceline.errors import CheckpointError
from tests.late import late

torch = late("torch")
parts = late("paceline.parallel.checkpoint.parts")


def write(folder: Path, *of_ranks: list[object]) -> None:
    for rank, pieces in enumerate(of_ranks):
        state, arrays, metadata = parts.encoded(pieces)
        write_file(folder / parts.part_name(rank, len(of_ranks)), state, arrays, metadata)


def halves(key: str, whole: object) -> list[object]:
    shape = tuple(whole.shape)  # type: ignore[attr-defined]
    return [
        parts.TensorPiece(key, (row, *[0] * (len(shape) - 1)), whole[row : row + 2], shape)  # type: ignore[index]
        for row in (0, 2)
    ]


def test_each_shard_has_one_writer_and_ranks_write_equal_amounts() -> None:
    boxes = [[(name, (0,), (size,), size) for name, size in (("a", 8), ("b", 4), ("c", 3), ("d", 1))]] * 2
    own = [("own", (0,), (1,), 1)]
    assert {box[0]: rank for box, rank in parts.writers(boxes).items()} == {"a": 0, "b": 1, "c": 1, "d": 1}
    assert parts.writers([[], own])[own[0]] == 1


def test_saved_shards_are_read_into_any_other_sharding(tmp_path: Path) -> None:
    whole, single = torch.arange(12.0).reshape(4, 3), torch.tensor(7)
    first, second = halves("x", whole)
    write(tmp_path, [first], [second, parts.TensorPiece("one", (), single, ())])
    found = parts.SavedParts(tmp_path)
    assert found.about == {"x": (whole.shape, torch.float32), "one": (torch.Size([]), torch.int64)}
    target, one = torch.zeros(4, 3), torch.zeros((), dtype=torch.int64)
    found.read_into({"x": target, "one": one})
    assert torch.equal(target, whole)
    assert one == 7


@pytest.mark.parametrize("name", ["complex128", "bfloat16", "float8_e5m2fnuz"])
def test_dtypes_unsupported_by_safetensors_keep_their_bits(tmp_path: Path, name: str) -> None:
    dtype = getattr(torch, name)
    whole = torch.arange(16, dtype=torch.uint8).reshape(1, 16).view(dtype)
    write(tmp_path, [parts.TensorPiece("x", (0, 0), whole, tuple(whole.shape))])
    target = torch.zeros_like(whole)
    parts.SavedParts(tmp_path).read_into({"x": target})
    assert torch.equal(target.view(torch.uint8), whole.view(torch.uint8))


def test_safetensors_reader_of_torch_reads_checkpoint_parts(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    storage = pytest.importorskip("torch.distributed.checkpoint.hf_storage")
    loader = pytest.importorskip("torch.distributed.checkpoint.state_dict_loader")
    whole = torch.arange(12.0).reshape(4, 3)
    write(tmp_path, *[[piece] for piece in halves("x", whole)])
    state = {"x": torch.zeros(4, 3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader.load(state, storage_reader=storage.HuggingFaceStorageReader(str(tmp_path)), no_dist=True)
    assert torch.equal(state["x"], whole)


def test_invalid_and_missing_checkpoint_parts_are_refused(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    first, second = halves("x", whole)
    write(tmp_path, [first], [second])
    target = {"x": torch.zeros(4, 3)}
    name = tmp_path / parts.part_name(1, 2)
    data = name.read_bytes()
    name.unlink()
    with pytest.raises(CheckpointError, match=r"it has 1 parts, and they are of \[2\] ranks"):
        parts.SavedParts(tmp_path)
    name.write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match=r"can't be read: part_1_of_2\.safetensors: .*Remove it"):
        parts.SavedParts(tmp_path)
    write_file(name, {"x": [1]}, [])
    with pytest.raises(CheckpointError, match=r"part_1_of_2\.safetensors says what no save"):
        parts.SavedParts(tmp_path)
    write_file(name, {}, [])
    with pytest.raises(CheckpointError, match="it lacks 6 values of 'x'"):
        parts.SavedParts(tmp_path).read_into(target)
