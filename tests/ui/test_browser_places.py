"""Models, services and compute targets in a real browser, with a real service."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.ui.conftest import HOSTILE
from tests.ui.test_browser import _ALL, _OF_COLOURS, Session, findings, page  # noqa: F401 - page is a fixture

SCORE = """
def predict(a: float, b: list[float]) -> float:
    if a < 0:
        raise ValueError("a must be positive")
    return a + sum(b)
"""


@pytest.mark.slow
def test_models_and_services_are_managed_in_a_browser(cli: Cli, page: Any) -> None:  # noqa: F811
    (cli.folder / "weights.txt").write_text("1")
    cli("model", "register", "digits", "weights.txt", "--description", f"**good** {HOSTILE}", "--tag", f"{HOSTILE}=1")
    (cli.folder / "weights.txt").write_text("22")
    cli("model", "register", "digits", "weights.txt")
    cli("service", "deploy", "adder", "--model", "digits:1", "--entry", cli.script(SCORE, "score.py"), "--auth")
    key = cli.json("service", "keys", "adder")["primary"]
    session = Session(cli, page)
    try:
        page.goto(session.url)
        page.wait_for_load_state("load")
        _looks(session)
        _versions(session)
        _service(session, key)
    finally:
        session.kill()
        cli("service", "delete", "adder")
    assert page.problems == []


def _looks(session: Session) -> None:
    """Every page fits a telephone, is accessible, and runs no foreign script."""
    found: list[str] = []
    views = {
        "models": "/models",
        "model": "/models/digits/1",
        "versions": "/models/digits",
        "services": "/services",
        "service": "/services/adder",
        "compute": "/compute",
    }
    for name, path in views.items():
        session.open(path)
        if name == "service":
            session.page.wait_for_selector("#plot-rate canvas")
        if name == "compute":
            session.page.wait_for_selector(".target progress")
        for scheme, rules in (("light", _ALL), ("dark", _OF_COLOURS)):
            session.page.emulate_media(color_scheme=scheme)
            session.page.wait_for_timeout(50)
            found += findings(session, f"{name}, {scheme}", rules)
            session.picture(f"places-{name}-{scheme}")
        session.page.set_viewport_size({"width": 390, "height": 800})
        assert session.page.evaluate("document.documentElement.scrollWidth") <= 390, name
        session.picture(f"places-{name}-phone")
        session.page.set_viewport_size({"width": 1300, "height": 900})
        assert session.page.title() != "owned"
    session.page.emulate_media(color_scheme="light")
    assert not found, "\n".join(found)


def _versions(session: Session) -> None:
    tab = session.page
    session.open("/models/digits/2")
    tab.get_by_text("Set an alias").click()
    tab.get_by_label("Alias", exact=True).fill("production")
    tab.keyboard.press("Enter")
    tab.wait_for_selector(".title .alias:has-text('production')")
    tab.get_by_text("Write a description").click()
    tab.get_by_label("Description in Markdown").fill("# Reads digits\n- fast")
    tab.get_by_role("button", name="Save").click()
    tab.wait_for_selector(".markdown li:has-text('fast')")
    session.open("/models/digits")
    assert tab.locator("#diff tr.differs:has-text('weights.txt')").is_visible()
    assert not tab.locator("#diff tr.same").first.is_visible()
    tab.get_by_label("only differences").uncheck()
    assert tab.locator("#diff tr.same").first.is_visible()


def _service(session: Session, key: str) -> None:
    tab = session.page
    session.open("/services/adder")
    assert tab.locator("#call textarea").input_value() == '{"a": 0.0, "b": [0.0]}'
    assert key not in tab.content()
    tab.locator("#call textarea").fill('{"a": 1, "b": [2]}')
    tab.get_by_role("button", name="Send").click()
    tab.wait_for_selector("#answer pre:has-text('3.0')")
    tab.locator("#call textarea").fill('{"a": -1, "b": [2]}')
    tab.get_by_role("button", name="Send").click()
    tab.wait_for_selector("#answer .failure")
    tab.wait_for_selector("#legend-rate:has-text('errors')")
    tab.wait_for_selector("pre.file:has-text('a must be positive')")
    assert key not in tab.content()
    tab.get_by_label("Replicas").last.fill("2")
    tab.get_by_role("button", name="Scale").click()
    tab.wait_for_selector("h2:has-text('Replicas') .count:text-is('2')")
