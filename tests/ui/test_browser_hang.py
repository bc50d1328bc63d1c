"""A run that hangs, in a real browser: the page changes by itself, draws which ranks wait for which, and samples stacks."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.engines.conftest import require_engine
from tests.ui.test_browser import _ALL, _OF_COLOURS, Session, findings, page  # noqa: F401 - a fixture

HANGS = """
import os, time
import torch, torch.distributed as dist
import paceline
dist.init_process_group("gloo")
run = paceline.Run.get_context()
for step in range(3):
    run.log("loss", 1.0 / (1 + step), step=step)
def load():
    while True:
        time.sleep(60)
if dist.get_rank() == 1:
    load()
dist.all_reduce(torch.ones(4))
"""


@pytest.mark.slow
def test_hang_appears_on_the_open_page_with_picture_and_stacks(cli: Cli, page: Any) -> None:  # noqa: F811
    require_engine("torch", importlib.util.find_spec("torch"))
    script = cli.script(HANGS, "hang/train.py")
    run = cli("submit", "-e", "hang", "-j", "3", "--backend", "gloo", "--hang-after", "8s", script).stdout.strip()
    session = Session(cli, page)
    try:
        page.goto(session.url)
        session.open(f"/runs/{run}")
        page.wait_for_selector("#head[data-shown='Running']")
        page.wait_for_selector("#head[data-shown='Hangs'] .waits svg")
        assert page.title().startswith("! Hangs: ")
        assert page.evaluate("document.querySelector('link[rel=icon]').href").endswith("/icon-bad.svg")
        assert page.locator(".waits .cause .name").text_content() == "Rank 1"
        assert "train.py:11, `load`" in page.locator(".waits .cause").text_content()
        page.locator(".waits summary").press("Enter")
        told = page.locator(".waits li").first.inner_text()
        assert told.startswith("Ranks 0, 2 wait for rank 1 in all_reduce 1 ([4] float, 16 B), ")
        for scheme, rules in (("light", _ALL), ("dark", _OF_COLOURS)):
            page.emulate_media(color_scheme=scheme)
            page.wait_for_timeout(50)
            found = findings(session, f"hang, {scheme}", rules)
            assert not found, "\n".join(found)
            session.picture(f"hang-{scheme}")
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        session.picture("hang-phone")
        page.get_by_role("button", name="Stacks now").press("Enter")
        page.wait_for_selector("h1:has-text('Stacks of')")
        assert "train.py:11 load" in page.locator("pre.file").inner_text()
        assert not (found := findings(session, "stacks", _ALL)), found
    finally:
        session.kill()
        cli("cancel", run)
    assert page.problems == []
