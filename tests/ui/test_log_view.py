"""The log on the page: searches, levels, links to lines, and the whole log as text."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.runs import logs
from paceline.runs.folder import RunFolder
from paceline.runs.log_levels import LevelFilter, level_of
from paceline.ui import log_view
from tests.helpers import make_job
from tests.ui.conftest import HOSTILE, Place, say


def ask(place: Place, folder: RunFolder, query: str, status: int = 200) -> dict[str, Any]:
    answer = place.client().get(f"/runs/{folder.run_id}/log?{query}")
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


def texts(found: dict[str, Any]) -> list[str]:
    return [line[2] for line in found["lines"]]


def note(folder: RunFolder, *notes: tuple[int, int]) -> None:
    """Write the supervisor's notes: rank, and bytes of its log."""
    with open(folder.log_order(1), "a", encoding="utf-8") as file:
        file.writelines(f"1700000000.1 {rank} {size}\n" for rank, size in notes)


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("2026-11-28 10:00:00,123 - train - WARNING - slow", 30),
        ("ERROR:root:no", 40),
        ("[INFO] ok", 20),
        ('{"level": "error", "msg": "x"}', 40),
        ("level=warn msg=x", 30),
        ("E1128 12:30:00.123 12 cuda.cc:3] x", 40),
        ("[rank0]:[W1128 12:30:00.12 init.cpp] x", 30),
        ("/x/y.py:3: UserWarning: old", 30),
        ("torch.OutOfMemoryError: CUDA", 40),
        ("KeyboardInterrupt", 40),
        ("Traceback (most recent call last):", 40),
        ("CRITICAL x", 40),
        ("DEBUG x", 10),
        ("error rate 0.1, no warnings", 0),
        ("step 3 loss 0.5", 0),
        ("INFORMATION and ERRORS", 0),
    ],
)
def test_log_level_of_a_line_is_recognized(text: str, level: int) -> None:
    assert level_of(text) == level
    assert level < 30 or next(iter(LevelFilter(30).lines(0, f"a\n{text}\nb"))) == (2, text)


def test_log_filter_for_errors_keeps_whole_tracebacks(place: Place) -> None:
    folder = place.run(job=make_job(process_count_per_node=2, distributed_backend="gloo"))
    say(folder, "start\nTraceback (most recent call last):\n  File x\n    f()\n\x1b[31mValueError\x1b[0m: no\nend\n")
    say(folder, "fine\n\x1b[1;33mWARNING\x1b[0m slow\n", rank=1)
    found = ask(place, folder, "level=error")
    assert (found["count"], texts(found)[-1]) == (4, "\x1b[31mValueError\x1b[0m: no")
    assert ask(place, folder, "level=warning")["count"] == 5
    assert texts(ask(place, folder, "level=warning&search=SLOW")) == ["\x1b[1;33mWARNING\x1b[0m slow"]
    assert "Give one of" in ask(place, folder, "level=loud", 400)["error"]


def test_log_search_ignores_color_codes_and_counts_all_matches(place: Place) -> None:
    folder = place.run()
    say(folder, "lo\x1b[31mss\x1b[0m 1\n" + "loss 2\n" * 3000)
    found = ask(place, folder, "search=LOSS")
    assert (found["count"], len(found["lines"]), found["more"]) == (3001, 2000, True)


def test_regular_expression_search_finds_lines_in_worker_logs_and_the_driver_log(place: Place) -> None:
    folder = place.run()
    say(folder, "loss 0.5\nloss nan\nother\n")
    folder.driver_log.write_text("node 1 ready\nnode x\n")
    assert texts(ask(place, folder, r"regex=1&search=^loss\s%2B(nan|inf)$")) == ["loss nan"]
    assert texts(ask(place, folder, r"regex=1&of=driver&search=node \d")) == ["node 1 ready"]


@pytest.mark.parametrize("pattern", ["(", "a{99999999999}", "[", "%s" % ("(" * 500)])
def test_malformed_regular_expression_is_refused(place: Place, pattern: str) -> None:
    folder = place.run()
    say(folder, "a\n")
    said = ask(place, folder, f"regex=1&search={pattern}", 400)["error"]
    assert "malformed" in said
    assert "search for a text" in said


def test_regular_expression_that_takes_too_long_is_stopped(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = place.run()
    say(folder, "a" * 60 + "!\n")
    monkeypatch.setattr(log_view, "_LIMIT_S", 0.5)
    monkeypatch.setattr(log_view, "_MORE_S", 0.5)
    assert "takes longer" in ask(place, folder, "regex=1&search=(a%2B)%2B$", 400)["error"]


def test_log_search_over_its_time_limit_is_marked_as_partial(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = place.run()
    say(folder, "a line\n")
    monkeypatch.setattr(log_view, "_LIMIT_S", -1)
    assert ask(place, folder, "search=line")["is_partial"]


def test_link_to_a_log_line_opens_the_lines_around_it(place: Place) -> None:
    folder = place.run(job=make_job(process_count_per_node=2, distributed_backend="gloo"))
    for number in range(0, 3000, 100):
        for rank in (0, 1):
            say(folder, "".join(f"rank {rank} line {one}\n" for one in range(number, number + 100)), rank=rank)
            note(folder, (rank, folder.rank_log(1, rank).stat().st_size))
    say(folder, "rank 0 without a note\n")
    say(folder, "rank 1 without a note\n", rank=1)
    everything = ask(place, folder, "last=20000")["lines"]
    assert len(everything) == 6002
    for number in (0, 1, 99, 100, 1234, 2999, 4321, 5999, 6000, 6001):
        attempt, rank, text, _, begin = everything[number]
        found = ask(place, folder, f"line={attempt}.{rank}.{begin}&last=50")
        assert found["lines"][found["at"]][:3] == [attempt, rank, text]
        # The lines are those of the merged log, in its order.
        first = everything.index(found["lines"][0])
        assert found["lines"] == everything[first : first + len(found["lines"])]
        assert number - first >= min(number, 50)
        assert len(found["lines"]) > found["at"] + min(200, len(everything) - number - 1)
        # A link to any character of a line opens this line.
        inside = ask(place, folder, f"line={attempt}.{rank}.{begin + 3}&last=50&rank={rank}")
        assert inside["lines"][inside["at"]][2] == text
        assert {line[1] for line in inside["lines"]} == {rank}


@pytest.mark.parametrize("line", ["1", "1.0", "a.b.c", "1.0.-5", "1.0.99999999999999999999", "1.0.1.1", "1.²0.3"])
def test_malformed_link_to_a_log_line_is_refused(place: Place, line: str) -> None:
    assert "is not a line of a log" in ask(place, place.run(), f"line={line}", 400)["error"]


def test_link_to_a_missing_log_shows_nothing_and_link_past_the_end_of_a_log_shows_the_last_line(place: Place) -> None:
    folder = place.run()
    assert ask(place, folder, "line=7.3.10") == {"lines": [], "more": False, "at": -1}
    say(folder, "only\n")
    assert ask(place, folder, "line=1.0.99999")["lines"] == [[1, 0, "only", 1, 0]]


def test_byte_offset_of_each_log_line_equals_its_position_in_the_file(place: Place) -> None:
    folder = place.run()
    data = b"one\n\xff\xfe two\nbar 1\rbar 2\nthr\xc3\xa9e\n\n" + b"x" * 70_000 + b"\nlast"
    folder.rank_log(1, 0).write_bytes(data)
    for in_blocks in (False, True):
        for line in logs.lines_of(folder, [1], [0], in_blocks=in_blocks):
            first = line.text.split("\n")[0].replace("\ufffd", "")[:3].strip()
            if not first.startswith("x"):
                assert first.encode() in data[line.begin :][:10]
                assert line.begin == 0 or data[line.begin - 1 : line.begin] == b"\n"
    found = ask(place, folder, "search=last")
    assert found["lines"][0][4] == data.index(b"last")
    found = ask(place, folder, "search=two")
    assert found["lines"][0][4] == 4


def test_whole_log_is_sent_as_text_without_colours(place: Place) -> None:
    folder = place.run(job=make_job(process_count_per_node=2, distributed_backend="gloo"))
    say(folder, f"\x1b[31mred\x1b[0m\n{HOSTILE}\n")
    say(folder, "other\n", rank=1)
    client = place.client()
    answer = client.get(f"/runs/{folder.run_id}/log/text")
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.headers["content-disposition"].startswith("attachment")
    assert "\x1b" not in answer.text
    assert answer.text.splitlines()[0] == "0: red"
    assert client.get(f"/runs/{folder.run_id}/log/text?rank=1").text == "other\n"


def test_very_long_log_lines_are_truncated_in_the_response(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = place.run()
    say(folder, f"a{'x' * 3_000_000}\nlast x\n")
    lines = texts(ask(place, folder, "last=500"))
    assert len("".join(lines)) < 500_000
    assert lines[-1] == "last x"
    assert lines[0].startswith("axxx")
    assert lines[0].endswith(f"x … {(1 << 16) - 4000:,} more characters")
    # All lines together have a limit too. The last ones stay, and so does the number of matches.
    monkeypatch.setattr(log_view, "_MOST_CHARS", 10_000)
    for query in ("last=500", "search=x"):
        found = ask(place, folder, query)
        assert (texts(found)[-1], found["more"]) == ("last x", True)
        assert len(found["lines"]) == 4
    assert found["count"] == 46
