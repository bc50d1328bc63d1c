"""Files of safetensors are read by parts, and are those of the format's own library."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from paceline.parallel import ParallelError
from tests.late import late

torch = late("torch")
safetensors = late("paceline.parallel.large.safetensors")


@functools.cache
def values() -> dict[str, Any]:
    return {
        "a.weight": torch.arange(24.0).reshape(4, 6),
        "b": torch.arange(3, dtype=torch.int64),
        "c": torch.randn(2, 3, 4).to(torch.bfloat16),
        "number": torch.tensor(7.5, dtype=torch.float64),
        "none": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
        "unsigned": torch.tensor([1, 65535], dtype=torch.uint16),
    }


def written(folder: Path, name: str = "model.safetensors") -> Path:
    given = [(name, tuple(value.shape), value.dtype) for name, value in values().items()]
    writer = safetensors.Writer(folder / name, given)
    for value in values().values():
        writer.write(value)
    writer.close()
    return folder / name


def test_safetensors_are_read_whole_and_in_slices(tmp_path: Path) -> None:
    for found in (safetensors.Folder(written(tmp_path)), safetensors.Folder(tmp_path)):
        for name, value in values().items():
            assert torch.equal(found.read(name), value)
            assert found.read(name).dtype == value.dtype
        before = found.bytes_read
        assert torch.equal(found.read("a.weight", ((1, 3), (0, 6))), values()["a.weight"][1:3])
        assert torch.equal(found.read("a.weight", ((0, 4), (2, 5))), values()["a.weight"][:, 2:5])
        assert torch.equal(found.read("c", ((1, 2), (1, 3), (0, 2))), values()["c"][1:2, 1:3, :2])
        # Only the requested bytes were read; of `c`, whole rows of its second dimension.
        assert found.bytes_read - before == 12 * 4 + 12 * 4 + 8 * 2
        assert found.read("a.weight", ((4, 4), (0, 6))).shape == (0, 6)


def test_safetensors_library_and_paceline_read_each_others_files(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    there = library.load_file(written(tmp_path))
    assert there.keys() == values().keys()
    assert all(torch.equal(there[name], value) for name, value in values().items())
    library.save_file(values(), tmp_path / "other.safetensors", metadata={"format": "pt"})
    back = safetensors.Folder(tmp_path / "other.safetensors")
    assert all(torch.equal(back.read(name), value) for name, value in values().items())


def test_invalid_safetensors_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ParallelError, match="there is neither"):
        safetensors.Folder(tmp_path)
    (tmp_path / safetensors.INDEX).write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(ParallelError, match="not a file beside it"):
        safetensors.Folder(tmp_path)
    (tmp_path / safetensors.INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(ParallelError, match=r"is not there\. Copy all"):
        safetensors.Folder(tmp_path)
    (tmp_path / safetensors.INDEX).write_text("[]")
    with pytest.raises(ParallelError, match="is not an index"):
        safetensors.Folder(tmp_path)
    path = tmp_path / "x.safetensors"
    for content in (b"", b"\xff" * 20, b"\x02" + b"\0" * 7 + b"[]", b"\x02" + b"\0" * 7 + b"{", written_over(tmp_path)):
        path.write_bytes(content)
        with pytest.raises(ParallelError, match="is not a file of safetensors"):
            safetensors.Folder(path)


def written_over(folder: Path) -> bytes:
    """A file that ends before its last tensor does."""
    return written(folder, "whole.safetensors").read_bytes()[:-1]


def test_shape_that_differs_from_the_model_is_named(tmp_path: Path) -> None:
    found = safetensors.Folder(written(tmp_path))
    with pytest.raises(ParallelError, match=r"'a.weight' has the shape \[4, 6\], and the model's 'up' \[6, 4\]"):
        found.check("a.weight", (6, 4), "up")
    assert found.find(["x", "b"]) == "b"
    assert found.find(["x"]) is None
