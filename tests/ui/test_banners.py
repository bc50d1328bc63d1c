"""The banners at the top of a run's page, and the picture of which ranks wait for which."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from paceline.runs import states, store
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.record import Attempt, Hang
from paceline.system.files import write_json
from paceline.ui.banners import slow_ranks
from paceline.ui.wait_picture import picture_of_hang, wait_picture
from tests.helpers import make_job
from tests.observe.test_wait_graph import entry, rank, told
from tests.ui.conftest import HOSTILE, Place

HANG: Hang = {"since_utc": "2026-11-23T06:12:03.000Z", "text": "Rank 1 has not come.", "report": "attempts/1/hang.txt"}


def names(look: object) -> list[str]:
    return [box.name for box in wait_picture(look).boxes]  # type: ignore[arg-type]


def test_wait_picture_groups_a_thousand_waiting_ranks_into_one_box() -> None:
    waiting = rank(entry("all_reduce"))
    look = told(*[waiting] * 511, rank(at="data.py:41 load"), *[waiting] * 488)
    picture = wait_picture(look)  # type: ignore[arg-type]
    cause, others = picture.boxes
    assert (cause.name, cause.is_cause) == ("Rank 511", True)
    assert cause.place == "data.py:41, `load`"
    assert (others.name, others.is_cause) == ("Ranks 0–510, 512–999 (999)", False)
    assert others.y < cause.y
    assert picture.sentences[0] == "Ranks 0–510, 512–999 (999) wait for rank 511 in all_reduce 512, 310 s."


def test_wait_picture_shows_ranks_in_different_collectives_waiting_for_each_other() -> None:
    look = told(rank(entry("all_reduce")), rank(entry("broadcast")), rank(entry("all_reduce")))
    picture = wait_picture(look)  # type: ignore[arg-type]
    assert {arrow.sentence for arrow in picture.arrows} == {
        "Ranks 0, 2 wait for rank 1 in all_reduce 512, 310 s.",
        "Rank 1 waits for ranks 0, 2 in broadcast 512, 310 s.",
    }
    assert not any(box.is_cause for box in picture.boxes)


def test_wait_picture_places_the_rank_that_causes_a_chain_of_waits_at_the_bottom() -> None:
    first = entry("all_reduce", 7, channel="a", ranks="0,1")
    second = entry("broadcast", 3, channel="b", ranks="1,2")
    look = told(rank(first), rank(second), rank(at="data.py:41 load"))
    picture = wait_picture(look)  # type: ignore[arg-type]
    assert [box.name for box in sorted(picture.boxes, key=lambda box: box.y)] == ["Rank 0", "Rank 1", "Rank 2"]
    assert [box.name for box in picture.boxes if box.is_cause] == ["Rank 2"]


def test_picture_of_waiting_ranks_has_no_arrows_if_no_rank_is_missing() -> None:
    look = told(rank(entry("all_reduce")), rank(entry("all_reduce")))
    picture = wait_picture(look)  # type: ignore[arg-type]
    assert not picture.arrows
    assert picture.sentences[0] == "Ranks 0–1: all ranks have come to all_reduce 512, and it does not end."
    assert names(told(rank(at="a.py:1 f"), rank(at="b.py:1 f"), rank(at="a.py:1 f"))) == ["Rank 1", "Ranks 0, 2"]


def test_wait_picture_of_ranks_at_40_different_code_lines_has_only_12_boxes() -> None:
    look = told(rank(entry("all_reduce")), *(rank(at=f"a.py:{line} f") for line in range(1, 40)))
    assert len(names(look)) == 12


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"ranks": 3}', '{"ranks": {"x": {}}, "time": 1}', '{"time": "<", "ranks": {"0": 5}}']
)
def test_damaged_hang_report_gives_no_wait_graph(tmp_path: Path, content: str) -> None:
    folder = RunFolder(tmp_path)
    path = folder.hang_report(1).with_suffix(".json")
    path.parent.mkdir(parents=True)
    path.write_text(content)
    assert picture_of_hang(folder, 1) is None


def hanging(place: Place) -> RunFolder:
    folder = place.run(status=states.RUNNING, job=make_job(process_count_per_node=2, distributed_backend="gloo"))
    store.write(folder, dataclasses.replace(store.stored(folder), hang=HANG))
    return folder


def test_page_of_a_hanging_run_draws_its_wait_graph_with_escaped_names(place: Place) -> None:
    folder = hanging(place)
    look = told(rank(entry("all_reduce", name=HOSTILE)), rank(at="data.py:41 <b>load</b>"))
    write_json(folder.hang_report(1).with_suffix(".json"), look)
    text = place.client().get(f"/runs/{folder.run_id}").text
    assert '<g class="cause"><title>Rank 1: data.py:41, `&lt;b&gt;load&lt;/b&gt;`' in text
    assert "<li>Rank 0 waits for rank 1 in all_reduce 512" in text
    assert "<b>load</b>" not in text
    assert "<script>document" not in text
    assert "Stacks now" in text
    assert "Stacks now" not in place.client(read_only=True).get(f"/runs/{folder.run_id}").text


STRAGGLER = {
    "ranks": [3],
    "node": "<gpu7>",
    "factor": 1.8,
    "own_s": 0.43,
    "others_s": 0.24,
    "lost_s": 12.0,
    "why": "compute",
    "since_utc": "2026-11-23T06:12:03.000Z",
}


def test_run_page_names_the_straggler_its_node_and_the_start_time(place: Place) -> None:
    folder = place.run(status=states.RUNNING, job=make_job(process_count_per_node=4, distributed_backend="gloo"))
    write_json(folder.load(1), {"pace": {"ranks": {}, "straggler": STRAGGLER, "seconds": 60.0}})
    text = place.client().get(f"/runs/{folder.run_id}").text
    assert "Rank 3 on &lt;gpu7&gt; is 1.8 times as slow as the others" in text
    assert 'Since <time datetime="2026-11-23T06:12:03.000Z"' in text


@pytest.mark.parametrize(
    "sample", [[], {"pace": 3}, {"pace": {"straggler": {"ranks": 5}}}, {"pace": {"straggler": {"ranks": ["x"]}}}]
)
def test_no_slow_rank_is_reported_if_the_recorded_load_of_the_ranks_is_damaged(place: Place, sample: object) -> None:
    folder = place.run(status=states.RUNNING, job=make_job(process_count_per_node=4, distributed_backend="gloo"))
    write_json(folder.load(1), sample)
    assert slow_ranks(folder, store.stored(folder)) is None


def test_failure_names_the_first_rank_the_next_step_and_a_link_to_its_log(place: Place) -> None:
    folder = place.run(status=states.RUNNING)
    failure = FailureReport(cause="launcher", message="x", rank=3, node="gpu7", attempt=1)
    attempts = (Attempt(number=1, started_utc="2026-11-23T06:12:03.000Z", nodes=("gpu7",)),)
    store.write(
        folder, dataclasses.replace(store.stored(folder), status=states.FAILED, failure=failure, attempts=attempts)
    )
    text = place.client().get(f"/runs/{folder.run_id}").text
    for words in (
        "first failure: rank 3",
        "<code>paceline compute doctor ",
        "?log_rank=3#log-section",
        "<title>✕ Failed: ",
    ):
        assert words in text
