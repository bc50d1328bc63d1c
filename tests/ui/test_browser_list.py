"""The columns and groups of the list of runs in a real browser."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from paceline.runs import states
from tests.cli.conftest import Cli
from tests.helpers import make_job
from tests.ui.conftest import Place, log_values
from tests.ui.test_browser import _ALL, FIREFOX, Session, findings, page  # noqa: F401 - a fixture

#: The folder for screenshots of the list.
_PICTURES = os.environ.get("PACELINE_PICTURES")


def _picture(page: Any, name: str) -> None:  # noqa: F811 - the fixture
    if _PICTURES:
        page.screenshot(path=f"{_PICTURES}/{name}.png")


@pytest.mark.slow
def test_columns_and_groups_of_the_run_list_are_arranged_by_keyboard_and_mouse(cli: Cli, page: Any) -> None:  # noqa: F811 - the fixture
    place = Place(Path(cli.folder))
    for number in range(6):
        job = make_job(arguments=("--lr", ("0.1", "0.01")[number % 2], "--depth", "18"))
        folder = place.run(f"digits_170000000{number}_00000001", job=job, tags={"team": "vision"})
        log_values(folder, "val_acc", [0.5 + number / 10, 0.4 + number / 10])
    place.run("digits_1700000009_00000001", states.RUNNING, display_name="<b>live</b>")
    cli("trust", str(place.path))
    session = Session(cli, page)
    try:
        page.goto(session.url)
        page.wait_for_selector("#rows tr:nth-child(7)")

        def headings() -> list[str]:
            return [
                str(name)
                for name in page.locator("#runs th[data-name]").evaluate_all("all => all.map(one => one.dataset.name)")
            ]

        page.locator("#columns summary").focus()
        page.keyboard.press("Enter")
        page.fill("#column", "metrics.val_acc.best")
        page.keyboard.press("Enter")
        page.wait_for_selector("th[data-name='metrics.val_acc.best']")
        page.fill("#column", "params.lr")
        page.keyboard.press("Enter")
        page.wait_for_selector("th[data-name='params.lr']")
        assert "add=" not in page.url
        # The focus stays on the control, so that a second press moves the column further.
        page.focus("[aria-label='Move left params.lr']")
        page.keyboard.press("Enter")
        page.wait_for_function("() => location.search.includes('params.lr%2Cmetrics')")
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Move left params.lr"
        page.keyboard.press("Enter")
        page.wait_for_function("() => location.search.includes('params.lr%2Ctags')")
        page.click("[aria-label='Pin metrics.val_acc.best']")
        page.wait_for_selector("th.pin1[data-name='metrics.val_acc.best']")
        assert page.locator("#columns").get_attribute("open") is not None
        page.click("[aria-label='Remove column Target'] >> nth=0")
        page.wait_for_function("() => !document.querySelector('th[data-name=target]')")
        assert headings()[1:] == [
            "metrics.val_acc.best",
            "state",
            "experiment",
            "created",
            "duration",
            "latest",
            "params.lr",
            "tags",
        ]
        if FIREFOX:
            # WebDriver's mouse can't drag in Firefox.
            for name, event in (("params.lr", "dragstart"), ("state", "dragover"), ("state", "drop")):
                page.dispatch_event(f"th[data-name='{name}']", event)
        else:
            page.drag_and_drop("th[data-name='params.lr']", "th[data-name=state]")
        page.wait_for_function("() => document.querySelectorAll('#runs th[data-name]')[2].dataset.name === 'params.lr'")
        assert headings()[1:4] == ["metrics.val_acc.best", "params.lr", "state"]
        _picture(page, "columns")
        assert findings(session, "columns", _ALL) == []
        # A pinned column stays beside the name of the run while the others scroll.
        page.locator(".scroll").evaluate("box => { box.scrollLeft = 400; }")
        name, pinned = (page.locator(one).first.bounding_box() for one in ("td.c-run", "td.pin1"))
        assert abs(name["x"] + name["width"] - pinned["x"]) < 2
        page.click("[aria-label='Group by params.lr']")
        page.wait_for_selector("#rows tr.group")
        assert page.locator("#rows tr.group td[data-name='metrics.val_acc.best'] b").all_inner_texts() == [
            "0.8 ± 0.2 (3)",
            "0.7 ± 0.2 (3)",
        ]
        page.locator("#rows tr.group a").nth(1).focus()
        page.keyboard.press("Space")
        page.wait_for_selector("#rows tr:not(.group)")
        assert page.locator("#rows tr.group a").nth(1).get_attribute("aria-expanded") == "true"
        # The stream updates a changed group.
        new = place.run("digits_1700000012_00000001", job=make_job(arguments=("--lr", "0.1")))
        log_values(new, "val_acc", [0.7])
        page.wait_for_selector("#rows tr.group:has-text('(4)')")
        assert findings(session, "groups", _ALL) == []
        _picture(page, "groups")
        if _PICTURES:
            page.set_viewport_size({"width": 390, "height": 900})
            page.emulate_media(color_scheme="dark")
            _picture(page, "groups-dark-390")
            page.click("#columns summary")
            _picture(page, "groups-dark-390-folded")
            page.set_viewport_size({"width": 1300, "height": 900})
            _picture(page, "groups-dark")
        page.go_back()
        page.wait_for_selector("#rows tr.group a[aria-expanded=true]", state="detached")
        assert page.problems == []
    finally:
        session.kill()
        place.close()
