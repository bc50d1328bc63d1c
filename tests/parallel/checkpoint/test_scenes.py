"""Ranks that are killed while they save, and an epoch that worlds of several sizes share."""

from __future__ import annotations

import json
import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines.conftest import require_engine
from tests.parallel.checkpoint.scenes import SAMPLES
from tests.parallel.conftest import Ended, run_on_ranks

_PROGRAM = Path(__file__).with_name("scenes.py")


@pytest.fixture(autouse=True, scope="module")
def need_torch() -> None:
    require_engine("torch", find_spec("torch"))


def run(size: int, folder: Path, *arguments: str) -> list[Ended]:
    command = [str(_PROGRAM), str(folder), *arguments]
    return run_on_ranks(size, folder / "output", *command, timeout_s=240)


def assert_well(ended: list[Ended]) -> None:
    assert [end.returncode for end in ended] == [0] * len(ended), "\n".join(end.output[-1500:] for end in ended)


@pytest.mark.promise("checkpoint-complete-absent-whoever-killed")
def test_rank_killed_during_a_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    ended = run(2, tmp_path, "killed")
    assert ended[1].returncode == -9
    assert ended[0].returncode not in (0, 124), "rank 0 has to end too, and not well"
    left = [name for name in os.listdir(tmp_path) if ".saving-" in name]
    # Another number of workers can load the previous checkpoint too.
    assert_well(run(1, tmp_path, "after"))
    assert len(left) <= 1
    assert not [name for name in os.listdir(tmp_path) if ".saving-" in name or ".former" in name]


@pytest.mark.promise("loss-three-changes-size-without")
def test_training_with_three_changes_of_worker_count_has_the_losses_of_one_worker(tmp_path: Path) -> None:
    """DataParallel, FullyShard and a pipeline, over the ends of epochs; in float64, with AdamW."""
    losses = []
    for name, attempts in (("changing", ((2, 3), (4, 5), (1, 2), (2, 5))), ("steady", ((1, 15),))):
        folder = tmp_path / name
        folder.mkdir()
        for number, (size, steps) in enumerate(attempts, 1):
            assert_well(run(size, folder, "sizes", str(steps), str(number)))
        losses.append(
            {
                kind: [
                    loss
                    for number in range(1, len(attempts) + 1)
                    for loss in json.loads((folder / f"losses_{kind}_{number}.json").read_text())
                ]
                for kind in ("data", "shard", "pipe")
            }
        )
    changing, steady = losses
    for kind, expected in steady.items():
        assert len(changing[kind]) == len(expected) == 15
        assert changing[kind] == pytest.approx(expected, abs=1e-10, rel=0), kind


@pytest.mark.promise("sample-seen-twice-epoch-goes")
def test_epoch_resumed_on_other_worker_counts_sees_each_sample_once(tmp_path: Path) -> None:
    for size, batches in ((2, 2), (4, 3), (1, 0)):
        assert_well(run(size, tmp_path, "epoch", str(batches)))
    seen = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("seen_*.json")}
    assert len(seen) == 7
    assert Counter(number for numbers in seen.values() for number in numbers) == Counter(range(SAMPLES))
    # Each of the seven ranks has seen some samples.
    assert all(seen.values())
