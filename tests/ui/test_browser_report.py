"""A report in a real browser, opened as a file."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import paceline
from paceline.runs.metrics import MetricLog
from paceline.ui.report import write_report
from tests.cli.conftest import Cli
from tests.ui.conftest import HOSTILE, Place, log_values
from tests.ui.test_browser import _ALL, findings, page  # noqa: F401 - a fixture
from tests.ui.test_report import PNG, run_with_values


@pytest.mark.slow
def test_downloaded_report_file_works_in_a_browser(cli: Cli, page: Any, tmp_path: Path) -> None:  # noqa: F811 - the fixture
    place = Place(Path(cli.folder))
    folders = [run_with_values(place, number) for number in (1, 2, 3)]
    folders[0] = place.run("hostile_1700000009_00000001", display_name=HOSTILE)
    log_values(folders[0], "loss", range(1, 40))
    log_values(folders[0], HOSTILE, [1.0, 2.0])
    (folders[1].outputs / "x.png").write_bytes(PNG)
    log = MetricLog(folders[1].metric_log(1))
    log.other("image", "sample", "outputs/x.png")
    log.close()
    for name, runs, is_anonymous in (
        ("many", folders, False),
        ("one", folders[:1], False),
        ("anonymous", folders, True),
    ):
        write_report(runs, tmp_path / f"{name}.html", anonymous=is_anonymous)
    # The report makes no requests, so it works offline.
    page.context.set_offline(True)
    for name in ("one", "anonymous", "many"):
        page.problems.clear()
        page.goto(f"file://{tmp_path / name}.html")
        page.wait_for_selector(".chart canvas")
        page.wait_for_selector(".compared tbody td")
        assert page.title() != "owned"
        assert findings(SimpleNamespace(page=page), name, _ALL) == []  # type: ignore[arg-type]
        assert [one for one in page.problems if not one.startswith("file:")] == []
        for width, height, scheme in ((390, 800, "light"), (1300, 900, "dark"), (1300, 900, "light")):
            page.emulate_media(color_scheme=scheme)
            page.set_viewport_size({"width": width, "height": height})
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert findings(SimpleNamespace(page=page), f"{name} {scheme}", _ALL) == []  # type: ignore[arg-type]
            if shown := os.environ.get("REPORT_PICTURES"):
                page.screenshot(path=f"{shown}/{name}-{width}-{scheme}.png", full_page=True)
    assert page.locator(".gallery").evaluate("box => getComputedStyle(box).display") == "grid"
    chart = "document.querySelector('.chart').chart"
    assert page.evaluate(f"{chart}.name") == "loss"
    assert page.evaluate(f"{chart}.drawn.length") == 3
    box = page.locator(".chart .u-over").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 20, steps=4)
    page.mouse.up()
    page.wait_for_function(f"() => {chart}.plot.scales.x.min > 10 && {chart}.plot.scales.x.max < 35")
    page.click("#chart-reset")
    page.wait_for_function(f"() => {chart}.plot.scales.x.min === 0")
    page.select_option("#chart-axis", "relative")
    page.wait_for_function(f"() => {chart}.plot.scales.x.max < 10")
    page.uncheck("#legend li:first-child input")
    page.wait_for_function(f"() => {chart}.drawn.length === 2")
    page.fill("#table-filter", "lr")
    assert page.locator(".compared tbody th[scope=row]").all_inner_texts() == ["lr"]
    page.locator(".chart .menubutton").first.click()
    with page.expect_download() as download:
        page.click("text=Save as CSV")
    assert "loss" in Path(download.value.path()).read_text()


@pytest.mark.slow
def test_notebook_draws_the_curves_of_a_run(cli: Cli, page: Any, tmp_path: Path) -> None:  # noqa: F811 - the fixture
    place = Place(Path(cli.folder))
    folder = place.run(display_name=HOSTILE)
    run = paceline.Run.get(paceline.Workspace(place.path), folder.run_id)
    assert "<iframe" not in run._repr_html_()
    log_values(folder, "loss", range(1, 40))
    log_values(folder, HOSTILE, [1.0, 2.0])
    (tmp_path / "notebook.html").write_text(f"<!doctype html><title>notebook</title>{run._repr_html_()}", "utf-8")
    page.context.set_offline(True)
    page.goto(f"file://{tmp_path}/notebook.html")
    inside = page.frame_locator("iframe")
    inside.locator(".chart canvas").first.wait_for()
    assert inside.locator(".chart").count() == 2
    inside.locator("#chart-axis").select_option("relative")
    with page.expect_download() as download:
        inside.locator(".chart .menubutton").first.click()
        inside.get_by_text("Save as CSV").click()
    assert "loss" in Path(download.value.path()).read_text()
    assert page.title() == "notebook"
    # The scripts in the frame can't reach the notebook.
    assert (
        page.frames[1].evaluate("() => { try { return parent.document.title; } catch { return 'refused'; } }")
        == "refused"
    )
    assert [one for one in page.problems if not one.startswith(("file:", "about:"))] == []
    if shown := os.environ.get("REPORT_PICTURES"):
        page.screenshot(path=f"{shown}/notebook.png", full_page=True)
