"""Panels of logged media in a real browser: sliders by keyboard, one step at a time, and HTML that can do nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.ui.conftest import HOSTILE
from tests.ui.test_browser import _ALL, _OF_COLOURS, Session, findings, page

__all__ = ["page"]

SCRIPT = f"""
import os, time
import paceline
try:
    import numpy
    more = {{
        "sound": paceline.Audio(numpy.sin(numpy.arange(8000) / 3), 8000),
        "picture": paceline.Image(numpy.random.rand(24, 32, 3)),
    }}
except ImportError:
    more = {{}}
page = "<h1>%d</h1><script>top.document.title='owned'</script><meta http-equiv='refresh' content='0;url=/'>"
paceline.init(params={{"lr": 0.1}})
def tell(step):
    paceline.log({{
        "loss": 1.0, "words": {HOSTILE!r} + str(step), "table": [{{"a": step}}],
        "weights": paceline.Histogram(range(step + 2)), "report": paceline.Html(page % step), **more,
    }}, step=step)
for step in range(30):
    tell(step)
while not os.path.exists("outputs/stop"):
    if os.path.exists("outputs/go"):
        os.unlink("outputs/go")
        step += 1
        tell(step)
    time.sleep(0.05)
"""


@pytest.mark.slow
def test_media_panels_of_a_running_run_are_updated_in_a_browser(cli: Cli, page: Any) -> None:
    run = cli("submit", cli.script(SCRIPT)).stdout.strip()
    cli.wait(run, "Running")
    outputs = cli.run_folder(run) / "outputs"
    session = Session(cli, page)
    asked: list[str] = []
    page.on("request", lambda sent: "/others" in sent.url and asked.append(sent.url))
    try:
        page.goto(session.url)
        session.open(f"/runs/{run}")
        page.wait_for_selector("article.other[data-name=words][data-count='30'] pre")
        words, report = (page.locator(f"article.other[data-name={name}]") for name in ("words", "report"))
        assert words.locator("pre").inner_text().startswith("<script>")
        slider, label = words.locator("input[type=range]"), words.locator("output")
        assert label.inner_text() == slider.get_attribute("aria-valuetext") == "step 29"
        # Keys move the slider, and the page fetches only the step where the slider stops.
        asked.clear()
        slider.focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        page.wait_for_function("one => one.textContent === 'step 1'", arg=label.element_handle())
        assert slider.get_attribute("aria-valuetext") == "step 1"
        assert all("name=words&at=" in address for address in asked), asked
        assert len(asked) <= 2, asked
        # When new steps arrive, a panel that shows its last step moves on. A panel whose slider was moved stays at its
        # step.
        (outputs / "go").touch()
        page.wait_for_selector("article.other[data-name=table][data-count='31'] td:text-is('30')")
        page.wait_for_selector("article.other[data-name=words][data-count='31']")
        assert (label.inner_text(), slider.get_attribute("max")) == ("step 1", "30")
        # The page shows the HTML, but its scripts and its refresh do nothing.
        report.scroll_into_view_if_needed()
        page.frame_locator("article.other[data-name=report] iframe").locator("h1:text-is('30')").wait_for()
        assert page.title() != "owned"
        for name, part in (("sound", "audio"), ("picture", "img")):
            if page.locator(f"article.other[data-name={name}]").count():
                page.wait_for_selector(f"article.other[data-name={name}] {part}")
        # The browser itself reports that it has blocked the scripts.
        page.problems[:] = [said for said in page.problems if "sandboxed" not in said]
        found: list[str] = []
        for scheme, rules in (("light", _ALL), ("dark", _OF_COLOURS)):
            page.emulate_media(color_scheme=scheme)
            found += findings(session, scheme, rules)
            session.picture(f"media-{scheme}")
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        session.picture("media-phone")
        assert not found, "\n".join(found)
    finally:
        (outputs / "stop").touch()
        session.kill()
    assert page.problems == []
    assert cli.wait(run) == "Completed"
