from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from paceline.sweeps.pictures.draw import page
from paceline.sweeps.pictures.figure_data import sketch
from paceline.sweeps.pictures.importance import Importance
from tests.sweeps.pictures.trials import HOSTILE, SPEC, make_trials


class Elements(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.cells: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "td":
            self.cells.append(data)


SHARES = (("loss", (Importance(HOSTILE, 0.5, 12),)),)
PAGE = page(sketch(f"Sweep {HOSTILE}", SPEC, make_trials(), SHARES, [f"left out: {HOSTILE}"]))


@pytest.mark.promise("sweep-s-outputs-table-history")
def test_page_loads_nothing_from_other_addresses():
    assert "default-src 'none'" in PAGE
    assert not re.search(r"\b(src|href)=|@import|url\(|fetch\(", PAGE)
    assert set(re.findall(r"https?://[^\"' ]*", PAGE)) == {"http://www.w3.org/2000/svg"}


@pytest.mark.promise("sweep-s-outputs-table-history")
def test_hostile_text_creates_no_html_element():
    found = Elements(PAGE)
    assert found.tags.count("script") == 2
    # The history, the parallel coordinates, the importance, and a slice plot for each of five hyperparameters.
    assert found.tags.count("svg") == 8
    assert not {name for name in found.attributes if name.startswith("on")}
    assert found.cells.count(HOSTILE) == sum(HOSTILE in trial.values.values() for trial in make_trials())


def test_sweep_page_has_a_table_row_and_a_position_on_each_axis_for_each_trial():
    assert PAGE.count('<tr class="trial"') == 40
    places = json.loads(re.findall(r'id="places">(.*?)</script>', PAGE)[0])
    assert {len(places[str(number)]) for number in range(40)} == {6}
    assert places["3"][-1] is None
