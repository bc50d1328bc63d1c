from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.system.serialization import flat, known_fields, plain_fields


@dataclass(frozen=True)
class Inner:
    size: int

    def to_json(self) -> dict[str, object]:
        return {"size_mib": self.size}


@dataclass(frozen=True)
class Outer:
    where: Path
    inner: Inner | None = None
    several: tuple[Inner, ...] = ()
    words: tuple[tuple[str, int], ...] = ()
    values: Mapping[str, object] = field(default_factory=dict)


def test_dataclass_record_becomes_plain_json_values():
    record = Outer(Path("/a"), Inner(1), (Inner(2), Inner(3)), (("x", 1),), {"one": (1, 2), "two": {"inner": Inner(4)}})

    found = plain_fields(record)

    assert found == {
        "where": "/a",
        "inner": {"size_mib": 1},
        "several": [{"size_mib": 2}, {"size_mib": 3}],
        "words": [["x", 1]],
        "values": {"one": [1, 2], "two": {"inner": {"size_mib": 4}}},
    }
    assert json.loads(json.dumps(found)) == found


def test_unknown_fields_of_a_json_record_are_ignored():
    assert known_fields(Outer, {"where": "/a", "added": 1, "inner": None}) == {"where": "/a", "inner": None}


def test_nested_mapping_is_flattened_to_dotted_keys() -> None:
    values = {"a": {"b": {"c": 1}, "d": {}}, 2: [{"e": 1}]}
    assert dict(flat(values)) == {"a.b.c": 1, "2": [{"e": 1}]}
    assert dict(flat(values, is_whole=lambda value: not value or "c" in value)) == {
        "a.b": {"c": 1},
        "a.d": {},
        "2": [{"e": 1}],
    }
