"""A profile as people read it: the longest functions, where a rank is, the file of all samples."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.errors import RunStateError, UserError
from paceline.observe.profile import RunProfile, take
from paceline.runs import states
from tests.helpers import make_run

WORK = "/ws/runs/lab_1_2/work"
OURS = ["<module>", "/lib/paceline/worker/__main__.py", 120]
CLOCK = ["timed.<locals>.call", "/lib/paceline/system/step_clock.py", 150]
MAIN, STEP = ["<module>", f"{WORK}/train.py", 20], ["step", f"{WORK}/train.py", 8]
LOAD, LINE = ["load", f"{WORK}/data.py", 41], ["load", f"{WORK}/data.py", 42]
BACKWARD = ["backward", "/venv/lib/python3.11/site-packages/torch/_tensor.py", 623]
WAITS = ["_MultiProcessingDataLoaderIter._try_get_data", "/x/site-packages/torch/utils/data/dataloader.py", 1200]


def rank(*stacks, by="py-spy"):
    """stacks: (where, frames, how often)."""
    frames = []
    for _, stack, _ in stacks:
        frames += [frame for frame in stack if frame not in frames]
    told = [[where, [frames.index(frame) for frame in stack], count] for where, stack, count in stacks]
    return {"by": by, "rate": 10.0, "frames": frames, "stacks": told}


def told(*ranks):
    found = {str(number): one for number, one in enumerate(ranks)}
    report: Any = {"run_id": "lab_1_2", "work_dir": WORK, "ranks": found, "notes": ["a note"], "time": 1.0}
    return RunProfile(report)


def even():
    return rank(("main", [OURS, MAIN, STEP, BACKWARD], 90), ("main", [OURS, MAIN, CLOCK, LOAD], 10))


def slow():
    return rank(
        ("main", [OURS, MAIN, STEP, BACKWARD], 38),
        ("main", [OURS, MAIN, CLOCK, LOAD], 40),
        ("main", [OURS, MAIN, CLOCK, LINE], 22),
        ("pt_thread", [BACKWARD], 100),
    )


def test_profile_lists_the_functions_that_take_the_most_time_and_their_percentage_on_each_rank():
    lines = str(told(even(), even(), even(), slow())).splitlines()
    assert lines == [
        "   own    whole  function",
        " 77.0 %   77.0 %  backward  torch/_tensor.py:623   (ranks 0, 1 and 2 90 %, rank 3 38 %)",
        " 23.0 %   23.0 %  load  data.py:41   (rank 3 62 %, ranks 0, 1 and 2 10 %)",
        "Note: a note",
    ]
    (first, *_) = told(even(), slow()).functions(limit=1)
    assert (first.function, first.by_rank) == ("backward", {0: 0.9, 1: 0.38})


def test_profile_returns_the_most_frequent_code_line_of_a_rank():
    found = told(even(), slow())
    place, share = found.place(1)
    # Samples from several lines of one function count as one place.
    assert (place, round(share, 2)) == ("data.py:41, `load`", 0.62)
    assert found.place(0)[0] == "train.py:8, `step`"
    assert found.place(5) is None


def test_profile_of_a_rank_that_waits_for_its_data_loader_shows_code_lines_of_the_loader_process():
    one = rank(
        ("main", [OURS, MAIN, WAITS], 80),
        ("main", [OURS, MAIN, STEP, BACKWARD], 20),
        ("process 12 main", [OURS, MAIN, LOAD], 75),
        ("process 13 main", [OURS, MAIN, ["get", "/usr/lib/python3.11/multiprocessing/queues.py", 1]], 25),
    )
    place, share = told(one).place(0)
    assert (place, round(share, 2)) == ("data.py:41, `load` (of its data loader)", 0.6)
    assert "In the processes below the workers, such as a DataLoader's:" in str(told(one))


@pytest.mark.promise("paceline-profile-samples-workers-while")
def test_profile_is_saved_in_speedscope_format(tmp_path):
    path = told(even(), slow()).save(tmp_path / "a.json")
    found = json.loads(path.read_text())
    assert [one["name"] for one in found["profiles"]] == ["rank 0, main", "rank 1, main", "rank 1, pt_thread"]
    first = found["profiles"][1]
    assert first["endValue"] == sum(first["weights"]) == pytest.approx(10.0)
    frames = found["shared"]["frames"]
    # The profile omits frames below the script and frames of the sampler itself.
    assert [frames[number]["name"] for number in first["samples"][1]] == ["<module>", "load"]
    assert frames[first["samples"][1][-1]] == {"name": "load", "file": "data.py", "line": 41}


def test_profile_report_names_a_rank_that_could_not_be_sampled_and_the_reason():
    assert "Rank 0 could not be sampled: it is stopped." in str(told({"silent": "it is stopped"}))


def test_invalid_profile_requests_are_refused(tmp_path):
    folder, _ = make_run(tmp_path / "runs", status=states.QUEUED)
    for values, said in (({"seconds": 0.5}, "seconds=0.5"), ({"seconds": 601}, "seconds=601"), ({"rate": 0}, "rate=0")):
        with pytest.raises(UserError, match=said):
            take(folder, **values)
    with pytest.raises(RunStateError, match="is Queued: its workers have stacks while it is Running"):
        take(folder)
