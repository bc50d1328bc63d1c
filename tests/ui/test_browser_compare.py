"""The comparison in a real browser: the table, the curves, and changes of the chosen runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.runs.metrics import MetricLog
from tests.cli.conftest import Cli
from tests.helpers import make_job
from tests.ui.conftest import HOSTILE, Place, log_values
from tests.ui.test_browser import _ALL, Session, findings, page  # noqa: F401 - a fixture

#: Number of metrics of a run that has very many.
MANY = 900


@pytest.mark.slow
def test_runs_are_compared_in_a_browser(cli: Cli, page: Any) -> None:  # noqa: F811 - the fixture
    place, folders = Place(Path(cli.folder)), []
    for number in range(24):
        arguments = ("--lr", str(number / 10 + 0.1), "--deep")
        folder = place.run(f"a_17000000{number:02d}_00000001", job=make_job(arguments=arguments))
        log_values(folder, "loss", [3.0, 1.0 + number])
        folders.append(folder)
    log = MetricLog(folders[1].metric_log(0))
    for number in range(MANY):
        log.scalar(f"many/{number:04d}", number)
    log.scalar(HOSTILE, 1.0)
    log.close()
    cli("trust", str(place.path))
    session = Session(cli, page)
    try:
        page.goto(session.url)
        session.open("/compare?" + "&".join(f"run={folder.run_id}" for folder in folders))
        page.wait_for_selector(".compared tbody td")
        page.wait_for_selector(".chart canvas")
        # The browser requests each part of the data once, although it begins before all scripts are loaded.
        requests = page.evaluate("performance.getEntriesByType('resource').map(one => one.name)")
        first = [one.split("?")[0].rpartition("/")[2] for one in requests if "/compare/" in one and "name=" not in one]
        assert [first.count(part) for part in ("table", "curves")] == [1, 1]
        # The document has only the visible rows, and scrolling reaches every row.
        rows = page.locator(".compared tbody tr:not(.gap)")
        assert rows.count() < 100
        page.locator("#table").evaluate("box => { box.scrollTop = box.scrollHeight; }")
        page.wait_for_function("() => document.querySelector('.compared tbody').innerText.includes('many/0899')")
        page.fill("#table-filter", "lr")
        assert page.locator(".compared tbody th[scope=row]").all_inner_texts() == ["lr"]
        # A click on the name sorts the runs, and a second click reverses the order.
        page.click(".compared .order")
        page.locator(".compared .order").press("Enter")
        assert page.evaluate("document.activeElement.className") == "order"
        assert page.locator(".compared tbody td:not([colspan])").first.inner_text() == "2.4"
        page.fill("#table-filter", "deep")
        assert rows.count() == 0
        page.uncheck("#only-different")
        assert page.locator(".compared tbody th[scope=row]").all_inner_texts() == ["deep"]
        assert "all=1" in page.url
        # No two runs have the same colour and line style.
        looks = page.locator("#legend li").evaluate_all(
            "items => items.map(one => ['--mine', '--line-style'].map(name => one.style.getPropertyValue(name)).join())"
        )
        assert len(set(looks)) == len(folders)
        shown = "() => document.querySelector('.chart').chart.drawn.length"
        assert page.evaluate(shown) == len(folders)
        page.uncheck("#legend li:first-child input")
        page.wait_for_function(f"() => ({shown})() === {len(folders) - 1}")
        page.click("#legend li:nth-child(3) .remove")
        page.wait_for_function("() => document.querySelectorAll('#legend li').length === 23")
        assert folders[2].run_id not in page.url
        page.fill("#add-run", folders[2].run_id)
        page.keyboard.press("Enter")
        page.wait_for_function("() => document.querySelectorAll('#legend li').length === 24")
        # The document also has only the visible columns. The last column has the name of its run, and the right number.
        page.wait_for_selector(".compared tbody td")
        assert page.locator(".compared thead th.run").count() < len(folders)
        page.locator("#table").evaluate("box => { box.scrollLeft = box.scrollWidth; }")
        last = page.locator(f".compared thead th[aria-colindex='{len(folders) + 1}']")
        last.wait_for()
        box, of_table = last.bounding_box(), page.locator("#table").bounding_box()
        assert abs(box["x"] + box["width"] - of_table["x"] - of_table["width"]) < 20
        assert last.inner_text() == page.locator("#legend li").last.get_attribute("data-name")
        page.locator("#h-pictures").scroll_into_view_if_needed()
        page.wait_for_selector("#axes")
        page.select_option("#axes select[name=y]", "metrics/loss")
        page.wait_for_selector("h3:has-text('loss over lr')")
        # The page of a run with many metrics loads the list of metrics in two parts.
        back = page.url
        session.open(f"/runs/{folders[1].run_id}")
        page.wait_for_selector(f"#charts summary:has-text('many {MANY}')")
        page.fill("#chart-filter", f"many/{MANY - 1:04d}")
        assert page.locator("#charts .numbers dt:visible").all_inner_texts() == [f"many/{MANY - 1:04d}"]
        page.goto(back)
        page.wait_for_selector(".chart canvas")
        assert page.title() != "owned"
        assert findings(session, "compare", _ALL) == []
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    finally:
        session.kill()
    assert page.problems == []
