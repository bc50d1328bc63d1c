"""Views with names in a real browser."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.ui.conftest import Place, log_values
from tests.ui.test_browser import _ALL, Session, findings, page  # noqa: F401 - a fixture


@pytest.mark.slow
def test_saved_view_and_chart_layout_are_opened_from_the_views_page_in_a_browser(cli: Cli, page: Any) -> None:  # noqa: F811 - the fixture
    place = Place(Path(cli.folder))
    folders = [place.run(f"a_170000000{number}_00000001") for number in (1, 2)]
    for folder in folders:
        log_values(folder, "loss", [2.0, 1.0])
        log_values(folder, "acc", [0.1, 0.2])
    cli("trust", str(place.path))
    session = Session(cli, page)
    try:
        page.goto(session.url)
        page.fill("#q", "state=Completed")
        page.keyboard.press("Enter")
        page.wait_for_url("**q=state*")
        page.click("text=Save this view")
        page.fill(".savedviews input[name=name]", "done")
        page.click(".savedviews form button")
        page.wait_for_url("**/views")
        assert findings(session, "views", _ALL) == []
        page.click("text=done")
        page.wait_for_url("**/?q=state*")
        assert findings(session, "list", _ALL) == []
        # The charts of this run have the layout of the other run.
        session.open(f"/runs/{folders[0].run_id}?axis=relative")
        page.wait_for_selector(".chart canvas")
        page.locator(".chart .menubutton").nth(1).click()
        page.click("text=Pin to the top")
        page.wait_for_selector("#pinned .chart")
        page.click("text=Save this view")
        page.fill(".savedviews input[name=name]", "pinned acc")
        page.click(".savedviews form button")
        page.wait_for_url("**/views")
        page.evaluate("localStorage.clear()")
        session.open(f"/runs/{folders[1].run_id}?axis=step")
        page.wait_for_selector(".chart canvas")
        assert page.locator("#pinned .chart").count() == 0
        if shown := os.environ.get("REPORT_PICTURES"):
            page.screenshot(path=f"{shown}/run-views.png", full_page=True)
        page.click("text=pinned acc")
        page.wait_for_selector("#pinned .chart")
        assert "acc" in page.inner_text("#pinned")
        assert "axis=relative" in page.url
        for width in (390, 1300):
            page.set_viewport_size({"width": width, "height": 800})
            for at in ("/", "/views"):
                session.open(at)
                assert page.evaluate("document.documentElement.scrollWidth") <= width
                if shown := os.environ.get("REPORT_PICTURES"):
                    page.screenshot(path=f"{shown}/views{at.replace('/', '_')}{width}.png")
    finally:
        session.kill()
    assert page.problems == []
