"""A link in a frame of another page, in a real browser."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.ui.shares import SharedLinks
from tests.cli.conftest import Cli
from tests.ui.conftest import Place, log_values
from tests.ui.test_browser import _ALL, _OF_COLOURS, Session, findings, page  # noqa: F401 - a fixture


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """Serve a folder as another origin."""
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "favicon.ico").touch()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given, directory=str(folder))

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_curves_are_shown_in_an_iframe_on_a_site_that_the_shared_link_allows(
    cli: Cli,
    page: Any,  # noqa: F811 - the fixture
    site: tuple[str, Path],
) -> None:
    place, (origin, folder) = Place(Path(cli.folder)), site
    runs = [place.run(f"a_170000000{number}_00000001", display_name=f"run {number}") for number in (1, 2)]
    for run in runs:
        log_values(run, "loss", [3.0, 2.0, 1.0])
    cli("trust", str(place.path))
    session = Session(cli, page)
    try:
        # The owner makes the link on the page of a run. The link keeps the settings of the page's curves.
        page.goto(session.url)
        session.open(f"/runs/{runs[0].run_id}?axis=relative")
        page.click("#share")
        page.fill("input[name=origins]", origin)
        page.click("text=Make a link >> nth=-1")
        page.wait_for_selector("#shared-frame")
        shown = os.environ.get("REPORT_PICTURES")

        def look(name: str) -> None:
            """Examine the page in light and dark."""
            for scheme, rules in (("light", _ALL), ("dark", _OF_COLOURS)):
                page.emulate_media(color_scheme=scheme)
                assert findings(session, f"{name}, {scheme}", rules) == []
                if shown:
                    page.screenshot(path=f"{shown}/{name}-{scheme}.png", full_page=True)

        look("shares")
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        page.set_viewport_size({"width": 1300, "height": 800})
        html = page.input_value("#shared-frame")
        assert "axis=relative" in html
        _, token = SharedLinks(place.path).make(tuple(run.run_id for run in runs), 1, (origin,))
        _, alone = SharedLinks(place.path).make((), 1)
        (folder / "good.html").write_text(f"<!doctype html><title>Wiki</title>{html}")
        (folder / "two.html").write_text(
            f'<!doctype html><iframe src="{session.base}/shared/{token}/embed" width="800" height="500"></iframe>'
        )
        (folder / "bad.html").write_text(f'<!doctype html><iframe src="{session.base}/shared/{alone}/"></iframe>')
        page.context.clear_cookies()
        for name, count in (("good", 1), ("two", 2)):
            page.goto(f"{origin}/{name}.html")
            frame = page.frame_locator("iframe")
            frame.locator(".chart canvas").wait_for()
            assert page.frames[1].evaluate("document.querySelector('.chart').chart.drawn.length") == count
            assert page.frames[1].locator("form, nav").count() == 0
            if shown:
                page.screenshot(path=f"{shown}/frame-{name}.png")
        page.frames[1].goto(f"{session.base}/shared/{token}/embed?scale=log")
        page.goto(f"{session.base}/shared/{token}/embed")
        page.wait_for_selector(".chart canvas")
        look("embedded")
        assert page.problems == []
        page.goto(f"{origin}/bad.html")
        page.wait_for_function("() => document.readyState === 'complete'")
        assert page.frame_locator("iframe").locator("#main").count() == 0
        # The browser reports why the frame is empty.
        assert any("frame" in text.lower() for text in page.problems)
    finally:
        session.kill()
