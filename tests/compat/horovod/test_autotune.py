"""HOROVOD_AUTOTUNE on several ranks: results stay right, all ranks change over together, the log tells what was tried."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.collectives.settings import EngineSettings
from paceline.compat.horovod.common import autotune
from tests.compat.horovod.conftest import run_on_ranks

PROGRAM = Path(__file__).with_name("autotuned.py")
ROOT = Path(__file__).parents[3]
SHORT = {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2"}


def tuned(ranks: int, kind: str = "all", **variables: str) -> list[dict[str, Any]]:
    """What each rank has printed, in order of rank."""
    done = run_on_ranks(ranks, PROGRAM, kind, PYTHONPATH=str(ROOT), **(SHORT | variables))
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda seen: int(seen["rank"]))


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_end_with_the_same_settings_and_every_result_was_right(ranks, tmp_path):
    log = tmp_path / "new folder" / "autotune.csv"
    seen = tuned(ranks, HOROVOD_AUTOTUNE_LOG=str(log))
    assert [one["tuner"] for one in seen] == [True] * ranks
    assert len({json.dumps(one["point"]) for one in seen}) == 1
    assert all(one["settings"] == one["point"] for one in seen)
    rows = list(csv.DictReader(log.read_text().splitlines()))
    assert [row["state"] for row in rows] == ["warmup"] + ["sample"] * 8 + ["chosen"]
    assert [float(rows[-1]["fusion_threshold_bytes"]), float(rows[-1]["cycle_time_ms"]) / 1e3] == seen[0]["point"]
    assert all(float(row["bytes_per_second"]) > 0 for row in rows[1:])
    assert len({(row["fusion_threshold_bytes"], row["cycle_time_ms"]) for row in rows[1:-1]}) == 8


def test_what_is_set_by_hand_is_not_touched():
    (first, _) = tuned(2, HOROVOD_FUSION_THRESHOLD="1000", HOROVOD_CYCLE_TIME="2")
    assert (first["tuner"], first["point"]) == (True, [1000, 0.002])


def test_a_rank_that_joins_ends_it_without_an_error():
    seen = tuned(2, "join", HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE="30")
    assert len({json.dumps(one["settings"]) for one in seen}) == 1


def test_without_the_variable_nothing_is_tuned():
    assert [one["tuner"] for one in tuned(2, HOROVOD_AUTOTUNE="0")] == [None, None]


def test_a_variable_that_is_no_number_is_refused():
    engine = SimpleNamespace(size=2, rank=0, settings=EngineSettings(cycle_s=0.001))
    with pytest.raises(ValueError, match="HOROVOD_AUTOTUNE_WARMUP_SAMPLES='few' is no whole number"):
        autotune.begin(engine, {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "few"})
