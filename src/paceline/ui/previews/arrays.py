"""Contents of array files, which are neither unpickled nor read as a whole."""

from __future__ import annotations

import ast
import json
import math
import os
import zipfile
from collections.abc import Mapping
from typing import IO, BinaryIO

from paceline.data.transfer.progress import size_text
from paceline.runs.visible import visible
from paceline.system import safetensors
from paceline.ui.previews import CELL, COLUMNS, ROWS, WHOLE_BYTES, FilePreview, PreviewBlock, pickled

#: Maximum number of a file's entries that the preview lists.
_ENTRIES = 1000
#: Maximum bytes of an array's header. NumPy's default limit is 10,000 bytes.
_NPY_HEADER = 1 << 16
#: The key of the entry in which a checkpoint of `paceline.checkpoint` stores everything except arrays.
_STATE = "paceline.state"


def tensors(file: BinaryIO, _: str) -> FilePreview:
    """Return the preview of a safetensors file: its tensors and metadata."""
    found, metadata = safetensors.read_header(file)[:2]
    entries = [*found.items()]
    rows = [
        [key, str(one["dtype"]), _shape(one["shape"]), size_text(one["data_offsets"][1] - one["data_offsets"][0])]
        for key, one in entries[:_ENTRIES]
    ]
    count = sum(math.prod(one["shape"]) for one in found.values())
    blocks: list[PreviewBlock] = [
        {
            "kind": "table",
            "title": f"{len(entries):,} tensors with {count:,} values",
            "columns": ["Tensor", "Type", "Shape", "Size"],
            "rows": rows,
        }
    ]
    state = metadata.pop(_STATE, None)
    if metadata:
        blocks.append(_pairs("Metadata", metadata))
    if state is not None:
        text = json.dumps(json.loads(state), indent=1, ensure_ascii=False)
        blocks.append({"kind": "text", "title": "Values that are no tensors", "text": text[: WHOLE_BYTES >> 8]})
    return {"blocks": blocks, "notes": _cut(len(entries), "tensors")}


def numpy_header(file: BinaryIO, _: str) -> FilePreview:
    """Return the preview of a NumPy file: the array's shape and type."""
    shape, dtype, order = _npy(file)
    return {"blocks": [_pairs("Array", {"Shape": shape, "Type": dtype, "Order": order})], "notes": []}


def archive(file: BinaryIO, name: str) -> FilePreview:
    """Return the preview of a zip archive, such as `.npz` or `.pt`: its entries."""
    if not zipfile.is_zipfile(file):
        return {"blocks": [], "notes": ["The page can't show this binary file, and never unpickles one. Download it."]}
    is_numpy = name.lower().endswith(".npz")
    with zipfile.ZipFile(file) as source:
        entries = source.infolist()
        rows = [_entry(source, one, is_numpy=is_numpy) for one in entries[:_ENTRIES]]
        found = _torch(source)
    size = sum(one.file_size for one in entries)
    arrays_only = ["Shape", "Type"] if is_numpy else []
    block: PreviewBlock = {
        "kind": "table",
        "title": f"{len(entries):,} {'entry' if len(entries) == 1 else 'entries'}, {size_text(size)} if unpacked",
        "columns": ["Entry", *arrays_only, "Size", "Stored"],
        "rows": rows,
    }
    return {"blocks": [*found["blocks"], block], "notes": [*found["notes"], *_cut(len(entries), "entries")]}


def _torch(source: zipfile.ZipFile) -> FilePreview:
    """Return the preview of a file of `torch.save`, empty for other archives."""
    entry = next(
        (one for one in source.infolist() if one.filename.count("/") == 1 and one.filename.endswith("/data.pkl")), None
    )
    if entry is None:
        return {"blocks": [], "notes": []}
    try:
        with source.open(entry) as file:
            data = file.read(WHOLE_BYTES + 1)
        if len(data) > WHOLE_BYTES:
            raise ValueError(f"its pickle has more than {size_text(WHOLE_BYTES)}")
        found, values = pickled.tensors_of(data)
    # `pickletools` and `zipfile` may raise any exception if the file is malformed. The preview then lists only the zip's entries.
    except Exception as error:
        return {"blocks": [], "notes": [visible(f"The tensors can't be listed: {error}.")[:CELL]]}
    rows = [[one.name[:CELL], one.dtype[:CELL], _shape(one.shape)] for one in found[:_ENTRIES]]
    title = f"{len(found):,} tensors with {sum(one.count for one in found):,} values"
    blocks: list[PreviewBlock] = []
    if found:
        blocks.append({"kind": "table", "title": title, "columns": ["Tensor", "Type", "Shape"], "rows": rows})
    if values:
        blocks.append(_pairs("Values that are no tensors", values))
    return {"blocks": blocks, "notes": _cut(len(found), "tensors")}


def parquet(file: BinaryIO, _: str) -> FilePreview:
    """Return the preview of a Parquet file: its schema and first rows."""
    try:
        from pyarrow import parquet as arrow
    except ImportError:
        return {
            "blocks": [],
            "notes": ["A Parquet file needs pyarrow: pip install 'paceline[tabular]', or download it."],
        }
    file.seek(-8, os.SEEK_END)
    tail = file.read(8)
    footer = int.from_bytes(tail[:4], "little")
    if tail[4:] != b"PAR1" or footer > WHOLE_BYTES:
        raise ValueError(f"the end of the file is not a Parquet footer of at most {size_text(WHOLE_BYTES)}")
    source = arrow.ParquetFile(file)
    names, types = source.schema_arrow.names, source.schema_arrow.types
    columns: PreviewBlock = {
        "kind": "table",
        "title": f"{source.metadata.num_rows:,} rows, {len(names):,} columns",
        "columns": ["Column", "Type"],
        "rows": [[name[:CELL], str(kind)[:CELL]] for name, kind in zip(names[:_ENTRIES], types, strict=False)],
    }
    batches = source.iter_batches(batch_size=ROWS, row_groups=[0], columns=names[:COLUMNS], use_threads=False)
    batch = next(batches, None) if source.metadata.num_rows else None
    if batch is None:
        return {"blocks": [columns], "notes": _cut(len(names), "columns")}
    cells = [[visible(str(value))[:CELL] for value in column.to_pylist()] for column in batch.columns]
    rows: PreviewBlock = {
        "kind": "table",
        "title": "First rows",
        "columns": [name[:CELL] for name in batch.schema.names],
        "rows": [list(row) for row in zip(*cells, strict=True)],
    }
    notes = [f"The page shows {len(batch.columns)} of {len(names):,} columns, and the first {ROWS} rows."]
    return {"blocks": [rows, columns], "notes": notes}


def _npy(file: IO[bytes]) -> tuple[str, str, str]:
    magic = file.read(8)
    if magic[:6] != b"\x93NUMPY":
        raise ValueError("the file does not begin with NumPy's magic bytes")
    length = int.from_bytes(file.read(2 if magic[6] == 1 else 4), "little")
    if length > _NPY_HEADER:
        raise ValueError(f"its header would be {length:,} bytes long")
    header = ast.literal_eval(file.read(length).decode("latin-1").strip())
    return _shape(header["shape"]), str(header["descr"])[:CELL], "Fortran" if header["fortran_order"] else "C"


def _entry(source: zipfile.ZipFile, entry: zipfile.ZipInfo, *, is_numpy: bool) -> list[str]:
    about: list[str] = []
    if is_numpy:
        try:
            with source.open(entry) as file:
                about = [*_npy(file)[:2]]
        # Catch all exceptions: one malformed, encrypted or unknown entry must not hide the other entries of the file.
        except Exception:
            about = ["not an array", ""]
    return [entry.filename[:CELL], *about, size_text(entry.file_size), size_text(entry.compress_size)]


def _shape(shape: object) -> str:
    values = [int(size) for size in shape] if isinstance(shape, (list, tuple)) else []
    return " × ".join(map(str, values))[:CELL] or "one value"


def _pairs(title: str, values: Mapping[str, object]) -> PreviewBlock:
    rows = [[name[:CELL], str(value)[:CELL]] for name, value in [*values.items()][:_ENTRIES]]
    return {"kind": "table", "title": title, "columns": ["Name", "Value"], "rows": rows}


def _cut(count: int, what: str) -> list[str]:
    return [f"The page shows the first {_ENTRIES:,} of {count:,} {what}."] if count > _ENTRIES else []
