"""A workspace with runs of every kind, and its pages as a browser gets them, without a server."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.runs import states, store, tags_and_properties
from paceline.runs.failure import FailureReport
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import MetricLog
from paceline.runs.record import Attempt, utc_now
from paceline.runs.search.index import RunIndex
from paceline.ui import app
from paceline.ui.app import make_app
from paceline.ui.config import UiConfig
from paceline.ui.guard import Token
from paceline.ui.views import common, compare, listing, places, start
from tests.cli.conftest import cli  # noqa: F401 - a fixture
from tests.helpers import make_job, make_run

with warnings.catch_warnings():
    # Starlette prefers the successor of httpx, which no other test needs, and warns about it.
    warnings.simplefilter("ignore")
    from starlette.testclient import TestClient

#: Text that a browser may interpret as HTML, with control characters that a terminal obeys.
HOSTILE = "<script>document.title='owned'</script>\"'&\x1b]0;owned\x07\u202e"


class Place:
    """A workspace, and its page. client: a browser that has the cookie."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / ".paceline"
        self.runs_dir = self.path / "runs"
        self.runs_dir.mkdir(parents=True)
        self._held: list[int] = []

    def config(self, **values: Any) -> UiConfig:
        return UiConfig(workspace=str(self.path), **values)

    def client(self, *, cookie: bool = True, **values: Any) -> TestClient:
        token = Token(self.path)
        client = TestClient(
            make_app(self.config(**values), token), base_url="http://127.0.0.1:7223", raise_server_exceptions=True
        )
        if cookie:
            client.cookies.set(token.cookie, token.cookie_value)
        return client

    def run(
        self, run_id: str = "digits_1700000000_00000001", status: str = states.COMPLETED, **values: Any
    ) -> RunFolder:
        """Make a run in this state; this process supervises a running one."""
        name, tags = values.pop("display_name", None), values.pop("tags", {})
        folder, fd = make_run(self.runs_dir, run_id, **{"snapshot_id": "ab" * 32, **values})
        attempt = Attempt(number=1, started_utc=utc_now(), nodes=("local",))
        changes: dict[str, Any] = {"attempts": (attempt,), "started_utc": utc_now()}
        if status in states.TERMINAL:
            changes["ended_utc"] = utc_now()
        if status == states.FAILED:
            changes["failure"] = FailureReport(
                cause="exception", message=f"Rank 0 failed: {HOSTILE}", traceback=HOSTILE
            )
        folder.attempt(1).mkdir(parents=True)
        store.change(folder, store.stored(folder), status, **changes)
        if status in states.TERMINAL:
            os.close(fd)
        else:
            self._held.append(fd)
        if name:
            tags_and_properties.set_name(folder.notes, "display_name", name)
        tags_and_properties.set_tags(folder.notes, tags)
        return folder

    def close(self) -> None:
        for fd in self._held:
            os.close(fd)


def say(folder: RunFolder, text: str, rank: int = 0, attempt: int = 1) -> None:
    """Lines of a worker."""
    with open(folder.rank_log(attempt, rank), "a", encoding="utf-8") as log:
        log.write(text)


def log_values(folder: RunFolder, name: str, values: Any, rank: int = 0, attempt: int = 1, first: int = 0) -> None:
    log = MetricLog(folder.metric_log(rank, attempt), attempt=attempt)
    for step, value in enumerate(values):
        log.scalar(name, value, first + step)
    log.close()


@pytest.fixture(autouse=True)
def _patient_pages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pages wait for the list of runs: a busy machine may not have it within a user's 0.4 s, and show a page without it."""
    if "stuck" in request.fixturenames:
        return
    for module in (common, compare, listing, places, start):
        monkeypatch.setattr(module, "PATIENCE_S", 60.0)
    monkeypatch.setattr(
        app, "RunIndex", lambda runs_dir, *, metrics_s, cache, is_busy: RunIndex(runs_dir, cache=cache, is_busy=is_busy)
    )


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    made.close()


@pytest.fixture
def hostile(place: Place) -> RunFolder:
    """A run with hostile text in every field."""
    folder = place.run(
        status=states.FAILED,
        job=make_job(arguments=(HOSTILE,)),
        display_name=HOSTILE,
        tags={HOSTILE: HOSTILE},
        warnings=(HOSTILE,),
        submitted_by=HOSTILE,
        git={"commit": HOSTILE, "branch": HOSTILE},
    )
    log_values(folder, HOSTILE, [1.0, 2.0])
    log = MetricLog(folder.metric_log(0))
    log.other("row", HOSTILE, {HOSTILE: HOSTILE})
    log.other("image", HOSTILE, "outputs/x.svg")
    log.scalar("text", HOSTILE)
    log.close()
    say(folder, f"{HOSTILE}\n")
    (folder.outputs / "x.svg").write_text(f'<svg xmlns="http://www.w3.org/2000/svg">{HOSTILE}</svg>')
    (folder.outputs / "page.html").write_text(HOSTILE)
    (folder.outputs / "a <b> ?#%2e.txt").write_text(HOSTILE)
    Path(os.fsdecode(os.fsencode(folder.outputs) + b"/\xff.csv")).write_text(f"a,b\n{HOSTILE},2\n")
    return folder
