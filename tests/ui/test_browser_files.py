"""Files, log and details in a real browser: scripts of files do not run, and a line's link opens the log there."""

from __future__ import annotations

import io
import json
import threading
import wave
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.runs.folder import RunFolder
from paceline.ui.app import make_app
from paceline.ui.guard import Token
from tests.helpers import make_job, wait_until
from tests.ui.conftest import Place, say
from tests.ui.test_browser import _ALL, _OF_COLOURS, findings, page  # noqa: F401 - a fixture

SCRIPT = "<script>parent.document.title = 'owned'; document.title = 'owned'</script>"


class Served:
    """A tab that is open on a workspace's page."""

    def __init__(self, tab: Any, base: str) -> None:
        self.page, self.base = tab, base

    def open(self, path: str) -> None:
        self.page.goto(f"{self.base}{path}")
        self.page.wait_for_load_state("load")

    def check(self, name: str) -> None:
        """Look at the page as people with a screen reader, few colours or a telephone have it."""
        found: list[str] = []
        for scheme, rules in (("light", _ALL), ("dark", _OF_COLOURS)):
            self.page.emulate_media(color_scheme=scheme)
            self.page.wait_for_timeout(50)
            found += findings(self, f"{name}, {scheme}", rules)  # type: ignore[arg-type]
        assert found == []
        self.page.set_viewport_size({"width": 390, "height": 800})
        assert self.page.evaluate("document.documentElement.scrollWidth") <= 390, name
        self.page.set_viewport_size({"width": 1300, "height": 900})
        assert self.page.title() != "owned"


@pytest.fixture
def served(place: Place, page: Any) -> Iterator[Served]:  # noqa: F811 - the fixture of the browser
    import uvicorn

    token = Token(place.path)
    config = uvicorn.Config(make_app(place.config(), token), host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started, "the server has started")
        base = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        page.goto(f"{base}/?token={token.text}")
        yield Served(page, base)
    finally:
        page.goto("about:blank")
        server.should_exit = True
        thread.join()


def _write_files(folder: RunFolder) -> None:
    output = {"output_type": "display_data", "data": {"text/html": f"<table><tr><td>cell</td></tr></table>{SCRIPT}"}}
    cells = [
        {"cell_type": "markdown", "source": "# Heading"},
        {"cell_type": "code", "source": "x = 1", "outputs": [output]},
    ]
    sound = io.BytesIO()
    with wave.open(sound, "wb") as into:
        into.setnchannels(1)
        into.setsampwidth(1)
        into.setframerate(8000)
        into.writeframes(bytes(16_000))
    for name, data in {
        "nb.ipynb": json.dumps({"metadata": {}, "cells": cells}).encode(),
        "page.html": f"<h1>shown</h1>{SCRIPT}<a href='/' target='_top'>up</a>".encode(),
        "x.md": b"| a | b |\n|---|---|\n| 1 | 2 |\n\n## Part\n",
        "x.py": b"import os\n\n\ndef f(x: int) -> str:\n    # why\n    return 'a' + str(x)\n",
        "tone.wav": sound.getvalue(),
    }.items():
        (folder.outputs / name).write_bytes(data)


@pytest.mark.promise("scripts-write-text-page-files")
@pytest.mark.slow
def test_scripts_of_files_do_not_run_in_a_browser(place: Place, served: Served) -> None:
    folder, page = place.run(), served.page  # noqa: F811
    _write_files(folder)
    served.open(f"/runs/{folder.run_id}/files")
    served.check("files")
    for name, text in (("page.html", "shown"), ("nb.ipynb", "cell")):
        served.open(f"/runs/{folder.run_id}/look/outputs/{name}")
        assert text in page.frame_locator("iframe").locator("body").inner_text()
        assert page.title() != "owned"
        # The browser reports that it has blocked the script.
        assert len(page.problems) == 1
        assert "Blocked script execution" in page.problems.pop()
    # A link of the HTML file can't leave its frame.
    served.open(f"/runs/{folder.run_id}/look/outputs/page.html")
    address = page.url
    page.frame_locator("iframe").locator("a").click()
    page.wait_for_timeout(300)
    assert page.url == address
    page.problems.clear()
    for name in ("x.md", "x.py"):
        served.open(f"/runs/{folder.run_id}/look/outputs/{name}")
        served.check(name)
    served.open(f"/runs/{folder.run_id}/look/outputs/tone.wav")
    page.wait_for_function("() => document.querySelector('audio').duration === 2")
    page.evaluate("() => { document.querySelector('audio').currentTime = 1.5; }")
    page.wait_for_function(
        "() => document.querySelector('audio').currentTime === 1.5 && !document.querySelector('audio').seeking"
    )
    assert page.problems == []


@pytest.mark.slow
def test_line_of_a_long_log_is_found_and_linked_in_a_browser(place: Place, served: Served) -> None:
    folder, page = place.run(job=make_job(process_count_per_node=2, distributed_backend="gloo")), served.page  # noqa: F811
    for rank in (0, 1):
        say(folder, "".join(f"INFO step {step}\n" for step in range(5000)), rank=rank)
    say(folder, "ERROR it broke\nINFO end\n", rank=1)
    served.open(f"/runs/{folder.run_id}")
    page.wait_for_selector("#log .line")
    page.fill("#log-search", "step 25[0-9]$")
    page.check("#log-regex")
    page.wait_for_selector("#log-note:has-text('20 lines found')")
    for key, text in (("Enter", "Line 1 of 20"), ("Enter", "Line 2 of 20"), ("Shift+Enter", "Line 1 of 20")):
        page.press("#log-search", key)
        page.wait_for_selector(f"#log-note:has-text('{text}')")
    assert "step 250" in page.inner_text("#log .line.on")
    served.check("log")
    page.fill("#log-search", "(")
    page.wait_for_selector("#log-note:has-text('malformed')")
    # The browser reports that the server has refused the request.
    assert [problem for problem in page.problems if "400" not in problem] == []
    page.problems.clear()
    page.fill("#log-search", "")
    page.select_option("#log-level", "error")
    page.wait_for_selector("#log-note:has-text('1 line found')")
    page.locator("#log .line").hover()
    page.locator("#log .line a.link").click()
    page.wait_for_selector("#log .line.on:has-text('it broke')")
    assert f"line=1.1.{folder.rank_log(1, 1).read_text().index('ERROR')}" in page.url
    page.reload()
    page.wait_for_selector("#log .line.on:has-text('it broke')")
    assert page.locator("#log .line").count() > 100
    page.click("#log-latest")
    page.wait_for_selector("#log .line:has-text('INFO end')")
    assert "line=" not in page.url
    served.open(f"/runs/{folder.run_id}/details")
    served.check("details")
    assert page.problems == []
