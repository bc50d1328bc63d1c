"""Small stores of other trackers, written as those trackers write them."""

from __future__ import annotations

import datetime as dt
import sqlite3
import struct
import zlib
from collections.abc import Iterable
from decimal import Decimal
from pathlib import Path

import yaml

from paceline.trackers.imports import wandb_folder as wandb_log

START_MS = 1_700_000_000_000
#: The format of W&B's log: the size of a block, the head of a frame, and the types of frames.
BLOCK_BYTES, FRAME = 1 << 15, struct.Struct("<IHB")
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def mlflow_run(
    top: Path,
    key: str,
    *,
    metrics: dict[str, str] | None = None,
    params: dict[str, str] | None = None,
    tags: dict[str, str] | None = None,
    files: dict[str, str] | None = None,
    **meta: object,
) -> Path:
    """A run of MLflow's file store. metrics: name -> lines of `time value step`."""
    experiment = top / "1"
    place = experiment / key
    for folder in ("metrics", "params", "tags", "artifacts"):
        (place / folder).mkdir(parents=True, exist_ok=True)
    (experiment / "meta.yaml").write_text("name: digits of pi\nexperiment_id: '1'\nlifecycle_stage: active\n")
    values = {"run_id": key, "run_name": f"name of {key}", "status": 3, "user_id": "ann", "lifecycle_stage": "active"}
    times = {"start_time": START_MS, "end_time": START_MS + 60_000}
    (place / "meta.yaml").write_text(yaml.safe_dump({**values, **times, **meta}))
    for folder, texts in (("metrics", metrics), ("params", params), ("tags", tags), ("artifacts", files)):
        for name, text in (texts or {}).items():
            path = place / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return place


def mlflow_lines(*values: float, first_step: int = 0) -> str:
    return "".join(f"{START_MS + 1000 * step} {value} {step}\n" for step, value in enumerate(values, first_step))


def mlflow_database(path: Path) -> sqlite3.Connection:
    """A database with the tables and columns that MLflow 3 has, and one run in it."""
    base = sqlite3.connect(path)
    base.executescript(
        """
        CREATE TABLE experiments (experiment_id INTEGER, name TEXT, lifecycle_stage TEXT);
        CREATE TABLE runs (run_uuid TEXT, name TEXT, status TEXT, start_time BIGINT, end_time BIGINT, user_id TEXT,
            lifecycle_stage TEXT, artifact_uri TEXT, experiment_id INTEGER);
        CREATE TABLE metrics (key TEXT, value DOUBLE, timestamp BIGINT, run_uuid TEXT, step BIGINT, is_nan BOOLEAN);
        CREATE TABLE params (key TEXT, value TEXT, run_uuid TEXT);
        CREATE TABLE tags (key TEXT, value TEXT, run_uuid TEXT);
        INSERT INTO experiments VALUES (1, 'digits', 'active');
        """
    )
    files = path.parent / "mlruns" / "1" / "aa" / "artifacts"
    files.mkdir(parents=True)
    (files / "model.txt").write_text("weights")
    run = ("aa", "first", "KILLED", START_MS, START_MS + 5000, "ann", "active", str(files), 1)
    base.execute("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", run)
    base.execute("INSERT INTO params VALUES ('lr', '0.1', 'aa')")
    base.executemany("INSERT INTO tags VALUES (?, ?, 'aa')", [("team", "vision"), ("mlflow.note.content", "A note.")])
    values = [
        ("loss", 0.5, START_MS, 0, 0),
        ("loss", 0.0, START_MS + 1, 1, 1),
        ("top", 1.7976931348623157e308, START_MS, 0, 0),
    ]
    base.executemany("INSERT INTO metrics VALUES (?, ?, ?, 'aa', ?, ?)", values)
    base.commit()
    return base


def wandb_run(place: Path, records: Iterable[tuple[int, bytes]]) -> Path:
    """A W&B run folder whose log has these records, each (kind, content)."""
    place.mkdir(parents=True, exist_ok=True)
    log = bytearray(wandb_log.HEADER)
    for number, (kind, content) in enumerate(records):
        log += frames(message([(1, number), (kind, content)]), len(log))
    (place / "run-abc.wandb").write_bytes(log)
    return place


def frames(record: bytes, offset: int) -> bytes:
    """Return the bytes that append a record to a log of `offset` bytes."""
    made = bytearray()
    kind = FIRST
    while True:
        room = BLOCK_BYTES - (offset + len(made)) % BLOCK_BYTES
        if room < FRAME.size:
            made += bytes(room)
            continue
        data, record = record[: room - FRAME.size], record[room - FRAME.size :]
        if not record:
            kind = FULL if kind == FIRST else LAST
        made += FRAME.pack(zlib.crc32(data, zlib.crc32(bytes([kind]))), len(data), kind) + data
        if not record:
            return bytes(made)
        kind = MIDDLE


def message(parts: Iterable[tuple[int, int | str | bytes]]) -> bytes:
    """Return a serialized protobuf message of (field, value)."""
    made = bytearray()
    for number, value in parts:
        if isinstance(value, int):
            made += _varint(number << 3) + _varint(value)
        else:
            data = value.encode("utf-8", "replace") if isinstance(value, str) else value
            made += _varint(number << 3 | 2) + _varint(len(data)) + data
    return bytes(made)


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    made.append(number)
    return bytes(made)


def wandb_start(**config: str) -> tuple[int, bytes]:
    items = b"".join(message([(1, message([(1, key), (16, value)]))]) for key, value in config.items())
    start = message([(1, START_MS // 1000)])
    texts = [(1, "abc"), (3, "digits"), (8, "calm-sea-1"), (9, "A note."), (10, "good")]
    return wandb_log.RUN, message([*texts, (4, items), (17, start)])


def wandb_values(step: int, **values: str) -> tuple[int, bytes]:
    """A record of history. values: name -> JSON; two underscores in a name divide its parts."""
    values["_timestamp"] = str(START_MS / 1000 + step)
    items = [
        (1, message([*((2, part) for part in (name.split("__") if name[0] != "_" else [name])), (16, value)]))
        for name, value in values.items()
    ]
    return wandb_log.HISTORY, message([*items, (2, message([(1, step)]))])


def neptune_export(top: Path, rows: list[dict[str, object]]) -> None:
    """An export with the columns of Neptune's exporter. rows: only the columns that differ from null."""
    import pyarrow
    from pyarrow import parquet

    kinds = {
        "project_id": pyarrow.string(),
        "run_id": pyarrow.string(),
        "attribute_path": pyarrow.string(),
        "attribute_type": pyarrow.string(),
        "step": pyarrow.decimal128(18, 6),
        "timestamp": pyarrow.timestamp("ms", tz="UTC"),
        "int_value": pyarrow.int64(),
        "float_value": pyarrow.float64(),
        "string_value": pyarrow.string(),
        "bool_value": pyarrow.bool_(),
        "datetime_value": pyarrow.timestamp("ms", tz="UTC"),
        "string_set_value": pyarrow.list_(pyarrow.string()),
        "file_value": pyarrow.struct({"path": pyarrow.string()}),
    }
    common = {"project_id": "lab/digits", "run_id": "DIG-1"}
    full = [{name: {**common, **row}.get(name) for name in kinds} for row in rows]
    (top / "data" / "lab_digits").mkdir(parents=True)
    table = pyarrow.Table.from_pylist(full, schema=pyarrow.schema(kinds))
    parquet.write_table(table, top / "data" / "lab_digits" / "DIG-1_part_0.parquet")


def neptune_rows() -> list[dict[str, object]]:
    created = dt.datetime.fromtimestamp(START_MS / 1000, dt.timezone.utc)
    return [
        {"attribute_path": "sys/creation_time", "attribute_type": "datetime", "datetime_value": created},
        {"attribute_path": "sys/tags", "attribute_type": "string_set", "string_set_value": ["good"]},
        {"attribute_path": "sys/name", "attribute_type": "string", "string_value": "first"},
        {"attribute_path": "sys/failed", "attribute_type": "bool", "bool_value": True},
        {"attribute_path": "params/lr", "attribute_type": "float", "float_value": 0.1},
        *(
            {
                "attribute_path": "metrics/loss",
                "attribute_type": "float_series",
                "step": Decimal(step),
                "timestamp": created + dt.timedelta(seconds=step),
                "float_value": 1.0 / (1 + step),
            }
            for step in range(2)
        ),
        {"attribute_path": "model", "attribute_type": "file", "file_value": {"path": "lab_digits/model.txt"}},
        {"attribute_path": "secret", "attribute_type": "file", "file_value": {"path": "../../secret.txt"}},
    ]
