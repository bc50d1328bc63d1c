"""The page by keyboard alone: find, open, rename, compare, delete and restore runs. Live updates keep focus and open parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.helpers import make_job
from tests.ui.conftest import Place, log_values
from tests.ui.test_browser import Session, page  # noqa: F401 - a fixture

#: The maximum number of Tab stops between two controls. If there are more, a control is out of reach.
MOST_STOPS = 80

SWAP = """async () => {
    const { swap } = await import(`${document.body.dataset.static}ui.js`);
    const part = (name, more = "") => `<details><summary>${name}</summary><input name="${name}">${more}</details>`;
    const made = html => document.createRange().createContextualFragment(html), place = document.createElement("section");
    document.getElementById("main").append(place);
    place.append(made(part("2 stacks") + part("Tag", "<button>Add</button>")));
    const tag = place.querySelectorAll("details")[1];
    tag.open = true;
    tag.querySelector("button").focus();
    swap(place, () => made(part("Warnings") + part("3 stacks") + part("Tag", "<button>Add</button>")));
    return [Array.from(place.querySelectorAll("details"), one => one.open), document.activeElement.textContent];
}"""


def _tab_to(page: Any, selector: str, key: str = "Tab") -> None:  # noqa: F811 - the fixture
    for _ in range(MOST_STOPS):
        page.keyboard.press(key)
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none", f"{selector} shows no focus"
            return
    raise AssertionError(f"{key} does not reach {selector}")


@pytest.mark.slow
def test_runs_are_found_renamed_compared_and_restored_by_keyboard(cli: Cli, page: Any) -> None:  # noqa: F811
    place = Place(Path(cli.folder))
    first, second = (
        place.run(f"digits_170000000{number}_00000001", job=make_job(arguments=("--lr", f"0.{number}")))
        for number in (1, 2)
    )
    for folder in (first, second):
        log_values(folder, "loss", [3.0, 2.0, 1.0])
    cli("trust", str(place.path))
    session = Session(cli, page)
    try:
        page.goto(session.url)
        page.wait_for_selector("#rows tr")
        page.keyboard.press("/")
        page.keyboard.type("params.lr > 0.15")
        page.keyboard.press("Enter")
        page.wait_for_function(
            "() => document.querySelectorAll('#rows tr').length === 1 && location.search.includes('lr')"
        )
        _tab_to(page, f"tr[data-run='{second.run_id}'] a")
        page.keyboard.press("Enter")
        page.wait_for_selector(".chart canvas")
        # Enter opens the menu of a chart. Escape closes it and returns the focus to its button.
        _tab_to(page, ".chart .menubutton")
        page.keyboard.press("Enter")
        page.wait_for_selector(".chartmenu")
        page.keyboard.press("Escape")
        page.wait_for_selector(".chartmenu", state="detached")
        assert page.evaluate("document.activeElement.className") == "menubutton"
        _tab_to(page, ".addtag:has(input[name=name]) summary", "Shift+Tab")
        page.keyboard.press("Enter")
        _tab_to(page, "input[name=name]")
        page.keyboard.press("Control+A")
        page.keyboard.type("calm")
        page.keyboard.press("Enter")
        page.wait_for_selector("h1:has-text('calm')")
        assert page.evaluate(SWAP) == [[False, False, True], "Add"]
        session.open("/")
        for folder in (second, first):
            _tab_to(page, f"tr[data-run='{folder.run_id}'] input")
            page.keyboard.press("Space")
        _tab_to(page, "#compare")
        page.keyboard.press("Enter")
        page.wait_for_selector(".compared tbody td")
        assert "calm" in page.locator(".compared thead").inner_text()
        session.open("/")
        _tab_to(page, f"tr[data-run='{second.run_id}'] input")
        page.keyboard.press("Space")
        _tab_to(page, "#bulk button[value=delete]", "Shift+Tab")
        page.keyboard.press("Enter")
        page.wait_for_selector(f"tr[data-run='{second.run_id}']", state="detached")
        page.wait_for_function("() => document.activeElement.id === 'bulk-said'")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Undo"
        page.keyboard.press("Enter")
        page.wait_for_selector(f"tr[data-run='{second.run_id}']")
    finally:
        session.kill()
        place.close()
    assert page.problems == []
