"""Every page, with runs of every kind; text from scripts stays text."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import tempfile
from html.parser import HTMLParser
from pathlib import Path

import pytest

from paceline.pipelines.spec import PipelineSpec, StepSpec
from paceline.runs import states
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog
from paceline.ui import render, run_page
from tests.helpers import make_job
from tests.sweeps.made import add_trial, make_sweep
from tests.sweeps.pictures.trials import SPEC, make_trials
from tests.ui.conftest import HOSTILE, Place, log_values, say

PAGE = {"accept": "text/html"}


class Elements(HTMLParser):
    """The elements of a page as a browser sees them: scripts without a source, and attributes that run."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.runs: list[str] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "script" and "src" not in given and given.get("type") != "application/json":
            self.runs.append(tag)
        self.runs += [f"{tag} {name}" for name in given if name.startswith("on") or name == "style"]
        self.runs += [
            f"{tag} {name}" for name, value in attrs if (value or "").strip().lower().startswith("javascript:")
        ]
        if given.get("id"):
            self.ids.append(str(given["id"]))


def paths_of(folder: RunFolder) -> list[str]:
    base = f"/runs/{folder.run_id}"
    names = ["outputs/x.svg", "outputs/page.html", "outputs/a%20%3Cb%3E%20%3F%23%252e.txt", "outputs/%FF.csv"]
    return [
        *("/", "/?q=script&state=Failed", "/?tag=%3Cscript%3E", "/models", "/services", "/compute"),
        *(base, f"{base}/head", f"{base}/files", f"{base}/details", f"{base}/others"),
        *(f"{base}/look/{name}" for name in names),
        *(f"/compare?run={folder.run_id}", f"/compare?run={folder.run_id}x"),
    ]


@pytest.mark.promise("scripts-write-text-page-files")
def test_hostile_text_is_escaped_on_every_page(place: Place, hostile: RunFolder) -> None:
    client = place.client()
    for path in paths_of(hostile):
        answer = client.get(path, headers=PAGE)
        assert answer.status_code == (404 if path.endswith("x") and "compare" in path else 200), (
            path,
            answer.text[:500],
        )
        page = Elements(answer.text)
        assert page.runs == [], path
        assert len(page.ids) == len(set(page.ids)), path
        assert "\x1b" not in answer.text, path
        assert "\u202e" not in answer.text, path
    text = client.get(f"/runs/{hostile.run_id}").text
    assert "&lt;script&gt;document.title" in text
    assert client.get(f"/runs/{hostile.run_id}/curves").json()["names"][0]["name"] == HOSTILE
    (line,) = client.get(f"/runs/{hostile.run_id}/log").json()["lines"]
    # The sequence that sets a terminal's title is removed. Characters that reverse the direction of text are made visible.
    assert line[:2] == [1, 0]
    assert "\x1b" not in line[2]


@pytest.mark.promise("scripts-write-text-page-files")
def test_files_of_a_run_are_sent_as_sandboxed_attachments_with_inert_content_types(
    place: Place, hostile: RunFolder
) -> None:
    client = place.client()
    listed = client.get(f"/runs/{hostile.run_id}/files").text
    addresses = re.findall(rf'href="\.\./\.\.(/runs/{hostile.run_id}/file/[^"]+)"', listed)
    assert len(addresses) == 4
    for address in addresses:
        answer = client.get(address)
        assert answer.status_code == 200, address
        assert answer.headers["content-disposition"].startswith("attachment")
        assert "sandbox" in answer.headers["content-security-policy"]
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-type"] in ("application/octet-stream", "image/svg+xml")


@pytest.mark.promise("scripts-write-text-page-files")
@pytest.mark.parametrize(
    "name",
    [
        "../state.json",
        "outputs/../state.json",
        "outputs/..%2f..%2fstate.json",
        "%2Fetc%2Fpasswd",
        "outputs/out",
        "outputs/up/state.json",
        "state.json",
        "secrets.json",
        "exec_key",
        "outputs",
        "outputs/pipe",
        "outputs/%00",
        "",
    ],
)
def test_files_outside_the_run_return_404(place: Place, name: str) -> None:
    folder = place.run()
    (folder.outputs / "out").symlink_to("/etc/passwd")
    (folder.outputs / "up").symlink_to("..")
    os.mkfifo(folder.outputs / "pipe")
    folder.secrets.write_text("{}")
    client = place.client()
    for part in ("file", "look"):
        answer = client.get(f"/runs/{folder.run_id}/{part}/{name}")
        assert answer.status_code == 404, answer.text[:200]
        assert "root:" not in answer.text


@pytest.mark.parametrize("run_id", ["..%2fx", "nope", "a%00b", "-x", "digits_1700000000_0000000"])
def test_invalid_run_id_in_a_path_returns_404(place: Place, run_id: str) -> None:
    place.run("digits_1700000000_00000001")
    place.run("digits_1700000000_00000002")
    answer = place.client().get(f"/runs/{run_id}", headers=PAGE)
    assert answer.status_code in (404, 405), answer.text
    assert "Traceback" not in answer.text


def test_id_prefix_redirects_to_the_run(place: Place) -> None:
    folder = place.run()
    answer = place.client().get("/runs/digits_17", follow_redirects=False)
    assert answer.headers["location"] == f"./{folder.run_id}"


@pytest.mark.promise("list-filters-sorts-pages")
def test_run_list_page_supports_filters_sorting_and_paging(place: Place) -> None:
    place.run("digits_1700000001_00000001", display_name="warm up", tags={"lr": "0.1"})
    place.run("digits_1700000002_00000001", status=states.FAILED, tags={"lr": "0.2", "keep": None})
    place.run("words_1700000003_00000001", status=states.RUNNING)
    place.run("words_1700000003_00000001_0", parent_run_id="words_1700000003_00000001")
    client = place.client()

    def ids(query: str) -> list[str]:
        return re.findall(r'<tr role="row" data-run="([^"]+)"', client.get(f"/?{query}").text)

    assert ids("") == ["words_1700000003_00000001", "digits_1700000002_00000001", "digits_1700000001_00000001"]
    assert len(ids("trials=1")) == 4
    assert ids("parent=words_1700000003_00000001") == ["words_1700000003_00000001_0"]
    assert ids("experiment=digits&sort=created") == ["digits_1700000001_00000001", "digits_1700000002_00000001"]
    assert ids("state=live") == ["words_1700000003_00000001"]
    assert ids("state=Failed") == ids("tag=keep") == ids("tag=lr=0.2") == ["digits_1700000002_00000001"]
    assert ids("q=warm") == ids("q=tags.lr=0.1") == ["digits_1700000001_00000001"]
    assert ids("sort=state")[0] == "digits_1700000001_00000001"
    assert ids("sort=-state")[0] == "words_1700000003_00000001"
    assert ids("page=2") == []
    assert client.get("/?page=x").status_code == 400


def test_abandoned_run_is_not_shown_as_running(place: Place) -> None:
    folder = place.run(status=states.RUNNING)
    client = place.client()
    assert "Running" in client.get("/").text
    place.close()
    place._held.clear()
    assert 'data-status="Failed"' in client.get(f"/runs/{folder.run_id}").text


def test_curves_are_selected_by_rank_attempt_x_axis_and_step_range(place: Place) -> None:
    folder = place.run(job=make_job(process_count_per_node=12, distributed_backend="gloo"))
    for rank in range(12):
        log_values(folder, "loss", [float(rank), 2.0, 3.0], rank=rank)
    log_values(folder, "loss", [9.0], attempt=2, first=2)
    log_values(folder, "nan", [float("nan"), float("inf")])
    client = place.client()

    def curves(query: str = "") -> list[dict[str, object]]:
        answer = client.get(f"/runs/{folder.run_id}/curves?{query}")
        assert answer.status_code == 200, answer.text
        found: list[dict[str, object]] = answer.json()["curves"]
        return found

    # For many ranks, the page draws a band for each attempt, unless the request names ranks.
    first, second = curves("name=loss")
    assert (first["rank"], first["of"], first["x"], first["y"]) == (-1, 12, [0, 1], [5.5, 2])
    assert (first["lo"], first["hi"]) == ([0, 2], [11, 2])
    assert (second["of"], second["x"], second["y"]) == (1, [2], [9])
    assert client.get(f"/runs/{folder.run_id}/curves?name=nan&list=asked").json()["names"][0]["name"] == "nan"
    (eleven,) = curves("ranks=11&name=loss")
    assert (eleven["x"], eleven["y"], eleven["n"]) == ([0, 1, 2], [11.0, 2.0, 3.0], 3)
    of_zero = [(curve["attempt"], curve["x"]) for curve in curves("ranks=0&name=loss")]
    assert of_zero == [(1, [0, 1]), (2, [2])]
    assert [curve["x"] for curve in curves("ranks=0&name=loss&attempts=all")] == [[0, 1, 2], [2]]
    assert [curve["y"] for curve in curves("name=nan")] == [[None, None]]
    (timed,) = curves("ranks=11&name=loss&axis=time")
    assert all(isinstance(x, float) and x > 1.7e9 for x in timed["x"])  # type: ignore[attr-defined]
    assert curves("ranks=11&name=loss&from=0.5&to=0.7")[0]["x"] == [0, 1]
    for wrong in ("axis=color", "ranks=a", "from=x&to=1", "px=z"):
        assert client.get(f"/runs/{folder.run_id}/curves?{wrong}").status_code == 400
    names = client.get(f"/runs/{folder.run_id}/curves").json()["names"]
    assert {"name": "nan", "last": "inf"}.items() <= names[1].items()


def test_first_response_lists_only_the_first_of_many_metrics(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_page, "LISTED", 30)
    folder, client = place.run(), place.client()
    for number in range(40):
        log_values(folder, f"m{number}", [1.0, float(number)])
    address = f"/runs/{folder.run_id}/curves"
    first, rest = client.get(address).json(), client.get(f"{address}?list=all&name=").json()
    assert [one["name"] for one in first["names"]] == [f"m{number}" for number in range(30)]
    assert first["unlisted"] == 10
    assert [curve["name"] for curve in first["curves"]] == [f"m{number}" for number in range(24)]
    assert [(one["name"], one["last"]) for one in rest["names"]] == [(f"m{number}", number) for number in range(40)]
    assert (rest["unlisted"], rest["curves"]) == (0, [])


def test_log_lines_are_selected_by_rank_attempt_and_search_text(place: Place) -> None:
    folder = place.run(job=make_job(process_count_per_node=2, distributed_backend="gloo"))
    say(folder, "\x1b[31mred\x1b[0m\x1b[2J one\n" + "".join(f"line {n}\n" for n in range(2000)))
    say(folder, "hello from 1\n", rank=1)
    folder.driver_log.write_text("driver says\n")
    client = place.client()

    def lines(query: str = "") -> list[list[object]]:
        found: list[list[object]] = client.get(f"/runs/{folder.run_id}/log?{query}").json()["lines"]
        return found

    assert len(lines()) == 500
    assert lines("rank=1") == [[1, 1, "hello from 1", 1, 0]]
    assert lines("search=LINE 77&rank=0")[0][:4] == [1, 0, "line 77", 1]
    # Sequences for colours stay. Sequences that clear the screen are removed.
    assert lines("search=one")[0][2] == "\x1b[31mred\x1b[0m one"
    assert lines("of=driver") == [[0, 0, "driver says", 1, -1]]
    assert lines("of=prepare") == []
    assert lines("attempt=7") == []


def test_run_page_shows_logged_tables_rows_and_texts(place: Place) -> None:
    folder = place.run()
    log = MetricLog(folder.metric_log(0))
    log.other("row", "epochs", {"epoch": 1, "loss": 0.5})
    log.other("row", "epochs", {"epoch": 2, "loss": 0.25, "more": "x"})
    log.other("table", "confusion", {"class": ["cat", "dog"], "hits": [3, 4]})
    log.scalar("note", "warm")
    log.close()
    text = place.client().get(f"/runs/{folder.run_id}/others").text
    cells = re.findall(r"<t[dh]>([^<]*)</t", text)
    assert cells == ["epoch", "loss", "more", "1", "0.5", "", "2", "0.25", "x", "class", "hits", "cat", "3", "dog", "4"]
    assert "warm" in text


def test_static_files_of_the_page_are_cacheable(place: Place) -> None:
    client = place.client()
    address = re.search(r'href="\./(static/[0-9a-f]{10}/ui\.css)"', client.get("/").text)
    assert address
    answer = client.get(f"/{address[1]}")
    assert "immutable" in answer.headers["cache-control"]
    # The page loads nothing from other hosts, and the libraries in the package have their licences.
    for name in ("ui.css", "ui.js", "charts.js", "uplot.js", "uplot.css"):
        text = client.get(f"/static/x/{name}").text
        assert not re.search(r"(import|fetch|url)\s*\(?\s*[\"']?https?://", text), name
    assert "MIT" in client.get("/static/x/uPlot-LICENSE.txt").text
    assert client.get("/static/x/..%2f..%2fapp.py").status_code == 404


def test_unknown_page_shows_not_found_and_the_error_for_an_unknown_run_has_the_run_id(place: Place) -> None:
    client = place.client()
    assert "Not found" in client.get("/nothing", headers=PAGE).text
    assert json.loads(client.get("/runs/nope/curves").text)["error"].startswith("no run 'nope'")


def test_sweep_page_has_a_table_row_for_each_trial_and_charts(place: Place) -> None:
    sweep = make_sweep(place.runs_dir, SPEC, warnings=(HOSTILE,))
    for trial in make_trials(12):
        status = trial.status if trial.status in states.TERMINAL else states.COMPLETED
        add_trial(sweep, trial.number, trial.values, trial.curve, status, chosen=trial.chosen, metric=SPEC.metric)
    client = place.client()
    for path in (f"/runs/{sweep.run_id}/sweep", f"/runs/{sweep.run_id}/sweep/live"):
        text = client.get(path, headers=PAGE).text
        if path.endswith("live"):
            # The stream of server-sent events has an end, because the sweep has ended.
            text = json.loads(re.findall(r"^data: (.*)$", text, re.M)[1])["html"]
        page = Elements(text)
        assert page.runs == []
        assert "<svg onload" not in text
        assert len(re.findall(r'<tr class="trial', text)) == 12
        assert text.count("<polyline") >= 10
        places = re.search(r'<script type="application/json" id="places">(.*?)</script>', text)
        assert places
        assert len(json.loads(places[1])) == 12
    # The run page of a sweep links to its page of trials; other runs have no such page.
    assert "/sweep" in client.get(f"/runs/{sweep.run_id}").text
    assert client.get(f"/runs/{place.run('a_1700000001_00000001').run_id}/sweep").status_code == 404
    assert client.get("/runs/a_1700000001_00000001/sweep/live").status_code == 404


def test_page_of_a_sweep_opens_on_its_trials_and_has_a_log_tab(place: Place) -> None:
    sweep = make_sweep(place.runs_dir, SPEC)
    client = place.client()
    answer = client.get(f"/runs/{sweep.run_id}", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, f"./{sweep.run_id}/sweep")
    text = client.get(f"/runs/{sweep.run_id}?tab=log").text
    assert 'id="log"' in text
    assert re.findall(r'<a href="[^"]*"[^>]*>([A-Z][a-z ]+)</a>', text[text.index('class="tabs"') :])[:2] == [
        "Sweep",
        "Log",
    ]


def test_sweep_page_has_a_slice_plot_for_each_parameter_and_the_search_space_as_text(place: Place) -> None:
    sweep = make_sweep(place.runs_dir, SPEC)
    for trial in make_trials(3):
        add_trial(sweep, trial.number, trial.values, (1.0,), chosen=trial.chosen, metric=SPEC.metric)
    text = place.client().get(f"/runs/{sweep.run_id}/sweep").text
    # lr, the hostile choice, momentum or beta, and layers have one plot each.
    assert text.count('class="slice"') >= 4
    assert "--lr = loguniform(0.0001, 1)" in text
    assert Elements(text).runs == []
    assert "/again" not in place.client(read_only=True).get(f"/runs/{sweep.run_id}/sweep").text


def test_pipeline_page_shows_steps_in_order(place: Place) -> None:
    names = ("prepare", HOSTILE, "report")
    steps = tuple(
        StepSpec(name=name, job=make_job(), after=(number - 1,) if number else ()) for number, name in enumerate(names)
    )
    pipeline = PipelineSpec(steps=steps).to_json()
    folder = place.run("flow_1700000000_00000001", states.FAILED, kind="pipeline", pipeline=pipeline)
    step = place.run(f"{folder.run_id}_0", parent_run_id=folder.run_id)
    client = place.client()
    text = client.get(f"/runs/{folder.run_id}", headers=PAGE).text
    rows = re.findall(r'<tr><td class="num">(\d)</td><td>(.*?)</td>.*?</span> (\w+)</span>', text)
    assert [(number, state) for number, _, state in rows] == [("1", "Completed"), ("2", "Skipped"), ("3", "Skipped")]
    assert step.run_id in rows[0][1]
    assert Elements(text).runs == []
    assert client.get(f"/runs/{step.run_id}/steps").status_code == 404


def test_restarted_page_server_loads_compiled_html_templates_from_its_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "state" / "paceline" / "templates"
    render._templates.__wrapped__().get_template("macros.html")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (kept,) = folder.iterdir()
    later = render._templates.__wrapped__()
    with monkeypatch.context() as patch:
        patch.setattr(later, "compile", None)
        assert later.get_template("macros.html").module
    # If other users can write into the folder, the server does not use it, because it could contain their code.
    kept.unlink()
    folder.chmod(0o777)
    assert render._templates.__wrapped__().get_template("macros.html").module
    assert not [*folder.iterdir()]


def test_page_is_rendered_although_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full)
    assert render._templates.__wrapped__().get_template("macros.html").module
    assert not [*(tmp_path / "state" / "paceline" / "templates").iterdir()]
