from __future__ import annotations

import json
import re
import time

import pytest

from paceline.supervisor.diagnosis.stalls import stalled_text


def line(name: str, *missing: int, waited_s: float = 60, ago_s: float = 0, **values: object) -> str:
    """A line as the engine writes it."""
    told = {
        "time_s": time.time() - ago_s,
        "operation": "allreduce",
        "name": name,
        "process_set": 0,
        "waited_s": waited_s,
        "missing_ranks": missing,
        "submitted_ranks": [0],
        "resolved": False,
    }
    return json.dumps(told | values) + "\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "stalled.jsonl"


def test_without_a_line_nothing_is_said(path):
    assert stalled_text(path) is None
    path.touch()
    assert stalled_text(path) is None


def test_a_late_operation_is_named_with_its_ranks_and_its_time(path):
    path.write_text(line("gradient.3", 3, 1, waited_s=60, ago_s=15))
    found = re.fullmatch(
        r"At its end the ranks were stalled: allreduce 'gradient\.3' has waited for ranks 1, 3 for (\d+) s\.",
        stalled_text(path) or "",
    )
    assert found is not None
    assert int(found[1]) >= 75


def test_one_that_was_done_after_all_is_left_out(path):
    path.write_text(line("a", 1) + line("b", 1) + line("a", 1, resolved=True))
    text = stalled_text(path) or ""
    assert "'b'" in text
    assert "'a'" not in text


def test_one_name_in_two_process_sets_is_two_operations(path):
    path.write_text(line("a", 1) + line("a", 2, process_set=1) + line("a", 1, resolved=True))
    assert "rank 2 for" in (stalled_text(path) or "")


def test_many_are_counted(path):
    path.write_text("".join(line(f"t{number}", 1) for number in range(10)))
    assert (stalled_text(path) or "").endswith("; and 7 more.")


@pytest.mark.parametrize("broken", ['{"time_s": 1', "[]\n", '"x"\n', "{}\n", "\x00\xff\n"])
def test_a_line_that_was_cut_off_does_not_hide_the_others(path, broken):
    path.write_bytes(line("a", 1).encode() + broken.encode("latin-1"))
    assert "'a'" in (stalled_text(path) or "")
