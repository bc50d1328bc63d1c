"""Pieces of pages are updated: sent once to each page, made once for all."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from paceline.errors import RunNotFoundError
from paceline.models.model import Model
from paceline.runs import states, tags_and_properties
from paceline.services import record as services_states
from paceline.services import store as services_store
from paceline.services.folder import ServiceFolder
from paceline.services.record import ServiceRecord
from paceline.ui import pieces
from paceline.ui.guard import Token
from paceline.ui.pieces import PagePiece, PiecesSeen, PieceStreams
from paceline.ui.views import places, sweep
from paceline.workspace import Workspace
from tests.sweeps.made import add_trial, make_sweep
from tests.sweeps.pictures.trials import SPEC, make_trials
from tests.ui.conftest import HOSTILE, Place
from tests.ui.streams import PATIENCE_S, Watcher, opened


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "_REST", 0.0)
    monkeypatch.setattr(pieces, "_LOOK_S", 0.05)
    monkeypatch.setattr(sweep, "_LOOK_S", 0.05)


def run(does: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(does(), 3 * PATIENCE_S))


@pytest.mark.promise("models-services-targets-files-details")
def test_one_poll_sends_each_client_only_the_page_parts_that_changed() -> None:
    shown = {"a": "1", "b": "1"}
    looks, made = [], []

    def look() -> PiecesSeen:
        looks.append(1)
        if not shown:
            raise RunNotFoundError(f"no run {HOSTILE}")
        return PiecesSeen(
            {name: PagePiece(text, lambda text=text: made.append(text) or f"<p>{text}") for name, text in shown.items()}
        )

    async def does() -> None:
        streams = PieceStreams()
        watchers = [Watcher(streams.follow("page", look, place, look_s=0.02)) for place in ("", "a:1", "a:1,b:1")]
        first = await watchers[0].until(lambda event, value: value["name"] == "b")
        assert first == {"name": "b", "html": "<p>1"}
        assert (await watchers[1].until(lambda *_: True))["name"] == "b"
        assert made == ["1", "1"]
        shown["b"] = "2"
        for watcher in watchers:
            assert (await watcher.until(lambda event, value: value["html"] == "<p>2"))["name"] == "b"
            assert watcher.place == "a:1,b:2"
        assert made == ["1", "1", "2"]
        assert [value["html"] for _, value in watchers[2].told] == ["<p>2"]
        # If a part of the page is removed, a message with escaped text takes its place. The part may come back.
        shown.clear()
        gone = await watchers[0].until(lambda event, value: "no run" in value["html"])
        assert "<script>" not in gone["html"]
        shown["b"] = "3"
        await watchers[0].until(lambda event, value: value["html"] == "<p>3")
        for watcher in watchers:
            await watcher.stream.aclose()  # type: ignore[attr-defined]
        assert streams._watched == {}

    run(does)


@pytest.mark.promise("models-services-targets-files-details")
def test_open_pages_of_models_services_targets_files_and_sweeps_show_changes_live(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "_PAUSE_S", 0.0)
    app = place.client().app
    token = Token(place.path)
    cookie = f"{token.cookie}={token.cookie_value}"
    going = place.run(status=states.RUNNING, target="local", display_name=HOSTILE)
    tuned = make_sweep(place.runs_dir, SPEC, status=states.RUNNING)
    trials = make_trials(3)
    add_trial(
        tuned, 0, trials[0].values, trials[0].curve, states.COMPLETED, chosen=trials[0].chosen, metric=SPEC.metric
    )
    (place.path / "weights.txt").write_text("1")
    workspace = Workspace(place.path)

    async def does() -> None:
        async def told(path: str, change: Callable[[], object], text: str) -> None:
            async with opened(app, cookie, path) as watcher:
                # Wait for the first content, which every new connection gets.
                await watcher.until(lambda *_: True)
                await asyncio.to_thread(change)
                assert text in (await watcher.until(lambda event, value: text in value.get("html", "")))["html"]
                assert not any("<script>" in value["html"] for _, value in watcher.told)

        def register() -> Model:
            return Model.register(workspace, model_path=place.path / "weights.txt", model_name="digits")

        await told("/live/models", register, "digits:1")
        await told("/live/models/digits/1", lambda: Model(workspace, "digits").set_alias("best"), "best")
        Model.register(workspace, model_path=place.path / "weights.txt", model_name="words")
        await told("/live/models/words/1", Model(workspace, "words").delete, "no model")
        service = services_store.services_dir(place.path) / "digits"
        ServiceFolder(service).log.parent.mkdir(parents=True)
        record = ServiceRecord(name="digits", state=services_states.STOPPED)
        (service / "service.json").write_text(json.dumps(record.to_json()))

        def fail() -> None:
            services_store.change(ServiceFolder(service), record, state=services_states.FAILED, failure=HOSTILE)

        await told("/live/services", fail, "Failed")
        await told(
            "/live/services/digits", lambda: ServiceFolder(service).log.write_text(f"{HOSTILE}\nready\n"), "ready"
        )
        await told(
            "/live/compute",
            lambda: place.run("words_1700000003_00000001", states.QUEUED, target="local", waiting_for="a turn"),
            "a turn",
        )
        (going.outputs / "one.txt").write_text("1")
        await told(f"/runs/{going.run_id}/files/live", lambda: (going.outputs / "two.txt").write_text("2"), "two.txt")
        tag = {"seen": "today"}
        await told(
            f"/runs/{going.run_id}/details/live", lambda: tags_and_properties.set_tags(going.notes, tag), "today"
        )

        def next_trial() -> None:
            one = trials[1]
            add_trial(tuned, 1, one.values, one.curve, states.COMPLETED, chosen=one.chosen, metric=SPEC.metric)

        await told(f"/runs/{tuned.run_id}/sweep/live", next_trial, 'data-trial="1"')

    run(does)
