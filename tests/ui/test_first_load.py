"""The bytes of each page's first load, and the hosts that it needs."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from tests.sweeps.made import SWEEP_ID, make_sweep
from tests.sweeps.pictures.trials import SPEC
from tests.ui.conftest import Place, log_values

#: Addresses that a browser loads by itself, in pages, style sheets and modules.
_LOADED = re.compile(
    r"""<(?:link|script|img)\b[^>]*?\b(?:href|src)="([^"]+)"|\b(?:from|import)\s*\(?\s*"([./a-z][^"\s,]*)"|url\(["']?([^"')]+)"""
)
_MOST_BYTES = 350_000
RUN, OTHER = "digits_1700000000_00000001", "digits_1700000000_00000002"
PAGES = [
    "/",
    f"/runs/{RUN}",
    f"/runs/{RUN}/files",
    f"/runs/{RUN}/details",
    f"/runs/{SWEEP_ID}/sweep",
    f"/compare?run={RUN}&run={OTHER}",
    "/models",
    "/services",
    "/compute",
    "/trash",
]


@pytest.fixture
def client(place: Place) -> TestClient:
    for run_id in (RUN, OTHER):
        folder = place.run(run_id)
        for number in range(20):
            log_values(folder, f"layer{number}/weight", [0.5, 0.25])
    make_sweep(place.runs_dir, SPEC)
    return place.client()


def first_load(client: TestClient, page: str) -> dict[str, int]:
    """Return address -> compressed bytes of all files that a browser loads by itself for a page."""
    found: dict[str, int] = {}
    waiting = [page]
    while waiting:
        address = waiting.pop()
        if address in found:
            continue
        answer = client.get(address, headers={"accept": "text/html", "accept-encoding": "gzip"})
        assert answer.status_code == 200, address
        found[address] = answer.num_bytes_downloaded
        # uPlot is long and loads nothing, so its text is not searched.
        texts = [] if address.endswith(("uplot.js", ".svg")) else _LOADED.findall(answer.text)
        for one in map("".join, texts):
            assert not re.match(r"(?!data:)[a-z]+:|//", one), f"{address} loads {one}"
            if not one.startswith("data:"):
                waiting.append(str(answer.url.join(one).raw_path, "ascii"))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_first_page_load_is_small_and_loads_nothing_from_other_hosts(client: TestClient, page: str) -> None:
    found = first_load(client, page)
    assert {address.rpartition("/")[2] for address in found} >= {"ui.css", "ui.js"}
    assert sum(found.values()) <= _MOST_BYTES, sorted(found.items(), key=lambda one: -one[1])[:8]
