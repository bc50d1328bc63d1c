"""The page that compares runs, without a browser."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from paceline.runs import states
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog
from tests.helpers import make_job
from tests.ui.conftest import HOSTILE, Place, log_values
from tests.ui.test_app import Elements

PAGE = {"accept": "text/html"}


def _runs(place: Place, count: int) -> list[RunFolder]:
    """Runs with learning rates of their own, whose losses follow from them."""
    made = []
    for number in range(count):
        arguments = ("--lr", f"{0.1 * (number + 1):g}", "--deep", "--kind", "ab"[number % 2])
        folder = place.run(f"a_17000000{number:02d}_00000001", job=make_job(arguments=arguments))
        log_values(folder, "loss", [9.0, float(number), float(number) + 0.5])
        made.append(folder)
    return made


def _query(folders: list[RunFolder]) -> str:
    return "&".join(f"run={folder.run_id}" for folder in folders)


def _facts(place: Place, query: str) -> dict[tuple[str, str], list[object]]:
    found = place.client().get(f"/compare/table?{query}").json()["facts"]
    return {(name, part): values for _, name, part, values in found}


def test_comparison_table_has_params_and_metrics_of_each_run(place: Place) -> None:
    facts = _facts(place, _query(_runs(place, 3)))
    assert facts["lr", ""] == [0.1, 0.2, 0.3]
    # A value that all runs share is sent only once.
    assert facts["deep", ""] == ["true"]
    assert facts["loss", "last"] == [0.5, 1.5, 2.5]
    assert facts["loss", "best"] == facts["loss", "min"] == [0, 1, 2]
    assert facts["loss", "max"] == [9]


def test_comparison_table_lists_parameters_that_differ_before_equal_ones(place: Place) -> None:
    answer = place.client().get(f"/compare/table?{_query(_runs(place, 3))}").json()
    counts = [len(values) for kind, _, _, values in answer["facts"] if kind == "parameters"]
    assert counts[0] == 3
    assert counts == sorted(counts, reverse=True)


def test_comparison_shows_the_last_metric_value_of_the_lowest_rank(place: Place) -> None:
    folder = place.run()
    log_values(folder, "loss", [1.0, 2.0])
    log_values(folder, "loss", [7.0], rank=1)
    assert _facts(place, f"run={folder.run_id}")["loss", "last"] == [2]


def test_removed_run_is_left_out_of_the_comparison(place: Place) -> None:
    folders = _runs(place, 3)
    query = _query(folders)
    shutil.rmtree(folders[1].path)
    client = place.client()
    text = client.get(f"/compare?{query}", headers=PAGE).text
    assert f"no run &#39;{folders[1].run_id}&#39;" in text
    assert len(re.findall(r"<li data-run=", text)) == 2
    assert client.get(f"/compare/table?{query}").json()["runs"] == [folders[0].run_id, folders[2].run_id]
    # Curves keep the numbers of their runs, because a page that was opened before the removal uses them.
    curves = client.get(f"/compare/curves?{query}&name=loss").json()["curves"]
    assert [curve["run"] for curve in curves] == [0, 2]
    for part in ("pictures", "images"):
        assert client.get(f"/compare/{part}?{query}").status_code == 200
    for folder in folders[::2]:
        shutil.rmtree(folder.path)
    assert client.get(f"/compare/table?{query}").status_code == 404


def test_comparison_of_no_run_an_unknown_run_or_too_many_runs_is_refused(place: Place) -> None:
    client = place.client()
    assert "No run is named" in client.get("/compare/table").text
    assert "201 runs are chosen" in client.get("/compare?" + "&".join(f"run=x{n}" for n in range(201))).text
    assert client.get("/compare?run=../../etc").status_code == 404
    folder = place.run()
    assert "part=" in client.get(f"/compare/pictures?run={folder.run_id}&part=mean").text
    assert client.get(f"/compare/changes?run={folder.run_id}").status_code == 400


def test_run_is_added_to_the_comparison_by_its_name(place: Place) -> None:
    first, second = place.run(), place.run("b_1700000002_00000001", display_name="calm-heron-3")
    log_values(second, "extra", [0.9])
    client = place.client()
    answer = client.get(f"/compare?run={first.run_id}&run=calm-heron-3&axis=time", follow_redirects=False)
    assert answer.headers["location"] == f"./compare?run={first.run_id}&run={second.run_id}&axis=time"
    offered = client.get(f"/compare/names?run={first.run_id}&q=heron").json()
    assert [one["run_id"] for one in offered] == [second.run_id]
    assert client.get(f"/compare/names?run={second.run_id}&q=heron").json() == []
    # A query works as in the list of runs. Text that is not a query is searched as words.
    query = f"metrics.extra > 0.8 and id = {second.run_id}"
    assert [one["run_id"] for one in client.get("/compare/names", params={"q": query}).json()] == [second.run_id]
    assert client.get("/compare/names", params={"q": "heron >"}).json() == []


def test_first_response_of_the_compare_page_has_the_curves_of_the_first_metrics_only(place: Place) -> None:
    runs = _runs(place, 3)
    for folder in runs:
        for name in ("acc", "late"):
            log_values(folder, name, [0.5, 0.75])
    address, client = f"/compare/curves?{_query(runs)}", place.client()
    first = client.get(address).json()
    assert [one["name"] for one in first["names"]] == ["loss", "acc", "late"]
    assert [(one["name"], one["run"]) for one in first["curves"]] == [
        (name, run) for run in range(3) for name in ("loss", "acc")
    ]
    assert first["more"] == 0
    late = client.get(f"{address}&name=late").json()
    assert [(one["name"], one["run"], one["y"]) for one in late["curves"]] == [
        ("late", run, [0.5, 0.75]) for run in range(3)
    ]
    assert "more" not in late


def test_compare_page_loads_for_runs_without_metrics_or_parameters(place: Place) -> None:
    query = _query([place.run(job=None), place.run("b_1700000002_00000001", states.FAILED, job=None)])
    client = place.client()
    assert client.get(f"/compare?{query}").status_code == 200
    assert client.get(f"/compare/curves?{query}").json()["names"] == []
    assert "have logged no numbers" in client.get(f"/compare/pictures?{query}").text
    assert client.get(f"/compare/images?{query}").text.strip() == ""


def test_comparison_draws_scatter_importance_and_parallel_coordinates_of_the_runs(place: Place) -> None:
    pytest.importorskip("sklearn")
    query = _query(_runs(place, 12))
    text = place.client().get(f"/compare/pictures?{query}&y=metrics/loss&x=parameters/lr").text
    assert text.count("<polyline") == 12
    assert "Importance for loss" in text
    assert len(re.findall(r"<circle", text)) == 12
    places = re.search(r'id="places">(.*?)</script>', text)
    assert places
    assert json.loads(places[1])["11"][0] == 1
    # Kind "b" is not a number, so its axis shows text.
    assert ">b</text>" in text


def test_comparison_pictures_label_runs_with_their_names(place: Place) -> None:
    named = place.run("b_1700000002_00000001", display_name="<b>", job=make_job(arguments=("--lr", "1")))
    log_values(named, "loss", [0.1])
    titles = re.findall(
        r"<title>(.*?)</title>", place.client().get(f"/compare/pictures?{_query([*_runs(place, 2), named])}").text
    )
    assert "&lt;b&gt;, Completed" in titles
    assert not [title for title in titles if title.startswith("trial")]


def test_images_of_runs_are_listed_by_step(place: Place) -> None:
    folders = _runs(place, 2)
    for folder in folders:
        log = MetricLog(folder.metric_log(0))
        for step in (20, 10):
            log.other("image", "samples", f"outputs/{step} #.png", step)
        log.close()
    text = place.client().get(f"/compare/images?{_query(folders)}").text
    listed = re.findall(r"data-images='(.*?)'", text)
    assert [json.loads(one) for one in listed] == [[[10, "outputs/10%20%23.png"], [20, "outputs/20%20%23.png"]]] * 2
    assert f'data-folder="../runs/{folders[1].run_id}/file/"' in text


def test_hostile_texts_are_escaped_in_comparisons(place: Place, hostile: RunFolder) -> None:
    other = place.run("b_1700000002_00000001", job=make_job(arguments=("--lr", "1", f"--{HOSTILE}", HOSTILE)))
    log_values(other, HOSTILE, [3.0])
    query = _query([hostile, other])
    client = place.client()
    for path in ("/compare", "/compare/pictures", "/compare/images", "/compare/changes"):
        answer = client.get(f"{path}?{query}", headers=PAGE)
        assert answer.status_code == 200, path
        page = Elements(answer.text)
        assert page.runs == []
        assert "<script>document" not in answer.text
        assert "\u202e" not in answer.text
    assert client.get("/compare/names", params={"q": HOSTILE}).status_code == 200


def test_comparison_ignores_an_incomplete_metric_line(place: Place) -> None:
    folder = _runs(place, 1)[0]
    with Path(folder.metric_log(0)).open("a", encoding="utf-8") as log:
        log.write('{"name":"loss","val')
    assert _facts(place, f"run={folder.run_id}")["loss", "last"] == [0.5]
