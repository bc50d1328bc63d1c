from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog
from paceline.ui import curves as curves_module
from paceline.ui.curves import RunCurves
from paceline.ui.guard import POLICY
from paceline.ui.panels import Panel, panel_of, panels_of
from tests.ui.conftest import HOSTILE, Place


@pytest.fixture
def folder(place: Place) -> RunFolder:
    return place.run()


def logged(folder: RunFolder, *lines: tuple[str, str, object, int | None], rank: int = 0, attempt: int = 1) -> None:
    log = MetricLog(folder.metric_log(rank, attempt), attempt=attempt)
    for kind, name, value, step in lines:
        log.other(kind, name, value, step)
    log.close()


def panel(folder: RunFolder, name: str, at: int = -1, rank: int | None = None) -> Panel:
    curves = RunCurves(folder)
    curves.look()
    return panel_of(curves, name, at, rank)


def test_media_panel_shows_one_step_and_the_number_of_steps(folder: RunFolder) -> None:
    logged(folder, *(("image", "x", f"images/{step}.png", step) for step in (0, 20, 10)))
    assert [panel(folder, "x", at)["label"] for at in (0, 1, 2, -1, 99)] == [
        *("step 0", "step 10", "step 20"),
        *("step 20", "step 20"),
    ]
    assert panel(folder, "x", 1) == {
        **{"name": "x", "kind": "image", "count": 3, "at": 1, "label": "step 10", "ranks": [0], "more": 0},
        "items": [{"rank": 0, "file": "images/10.png"}],
    }


def test_media_logged_without_a_step_is_labeled_with_the_number_of_its_log_call(folder: RunFolder) -> None:
    logged(folder, ("table", "t", {"x": [1]}, None), ("table", "t", {"x": [2, 3]}, None))
    assert (panel(folder, "t", 0)["label"], panel(folder, "t")["label"]) == ("call 1", "call 2")
    assert panel(folder, "t")["items"][0]["rows"] == [[2], [3]]


def test_panel_shows_the_ranks_of_a_step_side_by_side(folder: RunFolder) -> None:
    for rank in (1, 0):
        logged(folder, ("text", "t", f"rank {rank}", 5), rank=rank)
    assert [item["text"] for item in panel(folder, "t")["items"]] == ["rank 0", "rank 1"]
    assert [item["text"] for item in panel(folder, "t", rank=1)["items"]] == ["rank 1"]
    assert panel(folder, "t", rank=7)["items"] == []


def test_later_attempt_replaces_the_step_that_it_logs_again(folder: RunFolder) -> None:
    logged(folder, ("text", "t", "old", 5), ("text", "t", "before", 4))
    logged(folder, ("text", "t", "new", 5), attempt=2)
    found = [panel(folder, "t", at)["items"] for at in (0, 1)]
    assert [[item["text"] for item in items] for items in found] == [["before"], ["new"]]


def test_media_panel_uses_the_last_kind_logged_under_a_name(folder: RunFolder) -> None:
    logged(folder, ("image", "x", "images/a.png", 1), ("html", "x", "html/a.html", 2))
    assert (panel(folder, "x")["kind"], panel(folder, "x")["count"]) == ("html", 1)


def test_azureml_artifact_url_of_a_logged_image_is_mapped_to_the_image_file(folder: RunFolder) -> None:
    logged(folder, ("image", "x", "aml://artifactId/ExperimentRun/dcid.digits_1_2/images/a.png", 1))
    assert panel(folder, "x")["items"] == [{"rank": 0, "file": "images/a.png"}]


BROKEN: list[tuple[str, Any]] = [
    *(("image", value) for value in ("../../etc/passwd", "/etc/passwd", "", None, 5, ["x"], {"a": 1})),
    *(("table", value) for value in (None, [1], "x", {"x": {"y": 1}}, {})),
    *(("row", value) for value in (None, [1], 5)),
    *(
        ("histogram", value)
        for value in (
            *(None, {}, {"counts": [1], "edges": [0]}, {"counts": ["x"], "edges": [0, 1]}),
            *({"counts": [1, 2], "edges": [0, 0, 0]}, {"counts": [-1], "edges": [0, 1]}),
            *({"counts": [float("nan")], "edges": [0, 1]}, {"counts": [0], "edges": [0, 1]}),
            {"counts": [True], "edges": [0, float("inf")]},
        )
    ),
    ("no such kind", {"x": [1]}),
    ("list", [None, {}]),
]


@pytest.mark.parametrize(("kind", "value"), BROKEN, ids=repr)
def test_panel_of_a_malformed_logged_value_shows_no_file_outside_the_run(place: Place, kind: str, value: Any) -> None:
    folder = place.run()
    logged(folder, (kind, "x", value, 1))
    text = place.client().get(f"/runs/{folder.run_id}/others").text
    assert 'data-name="x"' in text
    assert "file/../" not in text
    assert "passwd" not in re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("end", [b'{"name":"x","kind":5,"value":1}\n', b'{"name":"x","ki', b"[]\n", b"\xff\xfe\n"])
def test_broken_line_of_a_metric_log_hides_no_earlier_value_of_a_panel(folder: RunFolder, end: bytes) -> None:
    logged(folder, ("text", "t", "here", 1))
    with open(folder.metric_log(0), "ab") as file:
        file.write(end)
    assert panel(folder, "t")["items"][0]["text"] == "here"


def test_panel_whose_metric_log_was_removed_shows_null(folder: RunFolder) -> None:
    logged(folder, ("text", "t", "here", 1))
    curves = RunCurves(folder)
    curves.look()
    folder.metric_log(0).unlink()
    assert panel_of(curves, "t")["items"][0]["text"] == "null"


def test_long_tables_and_texts_are_truncated_in_a_panel(folder: RunFolder) -> None:
    logged(folder, ("table", "t", {"x": [*range(500)]}, 1), ("text", "long", "x" * 30_000, 1))
    item, long = panel(folder, "t")["items"][0], panel(folder, "long")["items"][0]
    assert (len(item["rows"]), item["more"]) == (200, 300)
    assert (len(long["text"]), long["is_cut"]) == (20_000, True)


def test_rows_logged_under_one_name_are_shown_as_one_table_with_the_last_200_rows(folder: RunFolder) -> None:
    logged(folder, *(("row", "epochs", {"epoch": number}, number) for number in range(300)))
    found = panel(folder, "epochs")
    assert (found["count"], found["items"][0]["more"]) == (1, 100)
    assert (found["items"][0]["rows"][0], found["items"][0]["rows"][-1]) == ([100], [299])


def test_panel_drops_the_oldest_values_of_a_name_over_the_limit(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves_module, "_MOST_OTHERS", 50)
    logged(folder, *(("text", "t", str(step), step) for step in range(200)))
    curves = RunCurves(folder)
    curves.look()
    assert (len(curves.others["t"]) <= 50, curves.other_count) == (True, 200)
    assert panel_of(curves, "t")["label"] == "step 199"


def test_histogram_panel_has_a_bar_for_each_count(folder: RunFolder) -> None:
    logged(folder, ("histogram", "h", {"counts": [3, 1], "edges": [0.0, 0.5, 1.0]}, 1))
    bars = panel(folder, "h")["items"][0]["bars"]
    assert [(bar["x"], bar["height"], bar["label"]) for bar in bars] == [
        (0, 120, "0 to 0.5: 3"),
        (200, 40, "0.5 to 1: 1"),
    ]


def test_panel_page_shows_100_panels_and_counts_further_ones(folder: RunFolder) -> None:
    logged(folder, *(("text", f"t{number}", "x", 1) for number in range(130)))
    curves = RunCurves(folder)
    curves.look()
    found = panels_of(curves)
    assert (len(found["panels"]), found["more"]) == (100, 30)


def test_panel_page_has_only_the_requested_step(place: Place) -> None:
    folder = place.run()
    logged(folder, *(("text", HOSTILE, f"{HOSTILE} {step}", step) for step in range(30)))
    client = place.client()
    address = f"/runs/{folder.run_id}/others"
    whole = client.get(address).text
    assert "<script>" not in whole
    assert whole.count("<pre") == 1
    assert 'max="29"' in whole
    one = client.get(address, params={"name": HOSTILE, "at": 3, "rank": 0}).text
    assert "<script>" not in one
    assert ('data-label="step 3"' in one, one.count("<pre"), "<article" in one) == (True, 1, False)
    assert "data-at" in client.get(address, params={"name": "no such name"}).text
    assert client.get(address, params={"name": HOSTILE, "at": "x"}).status_code == 400


def test_logged_html_is_framed_without_scripts_and_network(place: Place) -> None:
    folder = place.run()
    path = folder.artifacts / "html" / "a.html"
    path.parent.mkdir(parents=True)
    path.write_text("<script>alert(1)</script>")
    logged(folder, ("html", "report", "html/a.html", 1))
    client = place.client()
    text = client.get(f"/runs/{folder.run_id}/others").text
    assert '<iframe sandbox="" ' in text
    answer = client.get(f"/runs/{folder.run_id}/frame/html/a.html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert policy.startswith("sandbox")
    assert "script-src" not in policy
    assert "allow-" not in policy
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["x-frame-options"] == "SAMEORIGIN"
    page = client.get(f"/runs/{folder.run_id}").headers["content-security-policy"]
    assert page == f"{POLICY}; frame-src 'self'; media-src 'self'"
    assert client.get(f"/runs/{folder.run_id}/frame/html/none.html").status_code == 404


def test_line_index_of_a_metric_log_finds_every_line(folder: RunFolder) -> None:
    log = MetricLog(folder.metric_log(0))
    for step in range(3000):  # more lines than one chunk of the reader
        log.scalar("loss", 0.5, step)
        log.other("table", "t", {"x": [step] * 5, "ü": ["é" * (step % 50)]}, step)
    log.close()
    curves = RunCurves(folder)
    curves.look()
    values = [one.read() for one in curves.others["t"]]
    lines = [json.loads(line) for line in Path(folder.metric_log(0)).read_text().splitlines() if line]
    assert values == [line["value"] for line in lines if line.get("kind") == "table"]
