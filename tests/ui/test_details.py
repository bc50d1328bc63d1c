"""The page of a run's details, and its differences from another run."""

from __future__ import annotations

from paceline.runs.record import Attempt
from tests.helpers import make_job
from tests.ui.conftest import HOSTILE, Place
from tests.ui.test_app import PAGE, Elements


def shown(place: Place, run_id: str, query: str = "", status: int = 200) -> str:
    answer = place.client().get(f"/runs/{run_id}/details{query}", headers=PAGE)
    assert answer.status_code == status, answer.text[-400:]
    assert Elements(answer.text).runs == []
    return answer.text.partition('id="other"')[2] or answer.text


def test_details_show_differences_from_the_previous_run_of_the_script(place: Place) -> None:
    times = [f"2026-11-28T10:0{number}:00+00:00" for number in range(4)]
    first = place.run("digits_1700000001_00000001", job=make_job(arguments=("--lr", "0.1")), created_utc=times[0])
    place.run("digits_1700000002_00000001", job=make_job(entry_script="other.py"), created_utc=times[1])
    place.run("words_1700000002_00000001", job=make_job(), created_utc=times[1])
    second = place.run("digits_1700000003_00000001", job=make_job(arguments=("--lr", "0.2")), created_utc=times[2])
    place.run("digits_1700000004_00000001", job=make_job(), created_utc=times[3])
    page = shown(place, second.run_id)
    assert f"<th>{first.run_id}</th>" in page
    assert '<th scope="row">--lr</th><td>0.2</td><td>0.1</td>' in page
    assert f"compare?run={second.run_id}&amp;run={first.run_id}" in page
    assert "no earlier run of this script" in shown(place, first.run_id)


def test_details_show_differences_from_a_chosen_run(place: Place) -> None:
    place.run("digits_1700000001_00000001")
    place.run("words_1700000002_00000001", job=make_job(arguments=(HOSTILE,)))
    page = shown(place, "digits_1700000001_00000001", "?with=words_17")
    assert "<th>words_1700000002_00000001</th>" in page
    assert "&lt;script&gt;" in page
    same = shown(place, "digits_1700000001_00000001", "?with=digits_1700000001_00000001")
    assert "does not differ" in same
    shown(place, "digits_1700000001_00000001", "?with=nothing", 404)
    shown(place, "digits_1700000001_00000001", "?with=../x", 404)


def test_details_show_how_the_time_of_a_run_was_used(place: Place) -> None:
    attempt = Attempt(number=1, started_utc="2026-11-28T10:00:20Z", ended_utc="2026-11-28T10:01:00Z", cores=2)
    given = {"job": make_job(), "attempts": (attempt,), "ended_utc": "2026-11-28T10:01:00Z"}
    place.run("digits_1700000001_00000001", "Completed", created_utc="2026-11-28T10:00:00Z", **given)
    answer = place.client().get("/runs/digits_1700000001_00000001/details", headers=PAGE).text
    card = answer.partition('id="h-goodput"')[2]
    assert "ETTR 0.0 %" in card
    assert '<th scope="row">queue</th>' in card
    assert "100.0 %" in card
