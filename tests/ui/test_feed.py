"""What watchers of a run receive, and when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from paceline.runs import states, store
from paceline.runs.folder import RunFolder
from paceline.ui import curves, feed
from paceline.ui.curves import CurveStore
from paceline.ui.feed import TAIL, RunFeed, RunFeeds
from tests.ui.conftest import Place, log_values, say
from tests.ui.streams import PATIENCE_S, Watcher


def watched(place: Place, does: Callable[[RunFeeds], Awaitable[None]]) -> None:
    feeds = RunFeeds(place.runs_dir, CurveStore())
    asyncio.run(asyncio.wait_for(does(feeds), 3 * PATIENCE_S))


def end(place: Place, folder: RunFolder) -> None:
    store.change(folder, store.stored(folder), states.COMPLETED, ended_utc="2026-01-01T00:00:00.000Z")
    place.close()
    place._held.clear()


@pytest.mark.promise("lines-values-states-told-they")
def test_live_feed_of_a_page_streams_log_lines_metric_values_and_the_end(place: Place) -> None:
    folder = place.run(status=states.RUNNING)
    say(folder, "first\n")
    log_values(folder, "loss", [3.0])

    async def does(feeds: RunFeeds) -> None:
        page = Watcher(feeds.of(folder.run_id).watch(""))
        assert (await page.line("first"))["reset"] is True
        counts = await page.until(lambda event, value: event == "points")
        assert counts == [{"name": "loss", "rank": 0, "attempt": 1, "node": 0, "n": 1}]
        log_values(folder, "loss", [2.0], first=1)
        say(folder, "second\n")
        new = await page.until(lambda event, value: event == "points")
        assert new == [{"name": "loss", "rank": 0, "attempt": 1, "node": 0, "n": 2, "x": [1], "y": [2.0]}]
        if "second" not in page.lines():
            await page.line("second")
        end(place, folder)
        state = await page.until(lambda event, value: event == "state" and value["is_terminal"])
        assert state["status"] == states.COMPLETED
        await page.until(lambda event, value: event == "end")
        assert page.lines() == ["first", "second"]

    watched(place, does)


def test_live_feed_sends_values_that_another_request_has_read_first(place: Place) -> None:
    folder, known = place.run(status=states.RUNNING), CurveStore()
    log_values(folder, "loss", [3.0])

    async def does(feeds: RunFeeds) -> None:
        page = Watcher(feeds.of(folder.run_id).watch(""))
        await page.until(lambda event, value: event == "points")
        with known.open(folder) as logged:
            log_values(folder, "loss", [2.0], first=1)
            assert logged.look()
        new = await page.until(lambda event, value: event == "points")
        assert [(one["n"], one["y"]) for one in new] == [(2, [2.0])]
        await page.stream.aclose()  # type: ignore[attr-defined]

    asyncio.run(asyncio.wait_for(does(RunFeeds(place.runs_dir, known)), 3 * PATIENCE_S))


def test_live_feed_of_an_ended_run_reads_a_large_log_in_pieces_before_it_ends(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "_CHUNK", 1 << 12)
    monkeypatch.setattr(feed, "READ_S", 0.0)
    folder = place.run()
    log_values(folder, "loss", range(1000))

    async def does(feeds: RunFeeds) -> None:
        page = Watcher(feeds.of(folder.run_id).watch(""))
        await page.until(lambda event, value: event == "end")
        counts = [one["n"] for event, value in page.told if event == "points" for one in value]
        assert counts[-1] == 1000

    watched(place, does)


@pytest.mark.promise("lines-values-states-told-they")
def test_reconnected_page_gets_missed_events_once(place: Place) -> None:
    folder = place.run(status=states.RUNNING)
    say(folder, "one\n")

    async def does(feeds: RunFeeds) -> None:
        feed = feeds.of(folder.run_id)
        page, other = Watcher(feed.watch("")), Watcher(feed.watch(""))
        await page.line("one")
        await other.line("one")
        await page.stream.aclose()  # type: ignore[attr-defined]
        say(folder, "two\n")
        await other.line("two")
        back = Watcher(feed.watch(page.place))
        assert (await back.line("two"))["reset"] is False
        assert back.lines() == ["two"]
        # Another server does not know this position, so it sends everything from the start.
        anew = Watcher(RunFeeds(place.runs_dir, CurveStore()).of(folder.run_id).watch(page.place))
        assert (await anew.line("two"))["reset"] is True
        assert anew.lines() == ["one", "two"]
        for one in (other, back, anew):
            await one.stream.aclose()  # type: ignore[attr-defined]

    watched(place, does)


def test_live_feed_of_a_long_log_begins_with_its_last_lines(place: Place) -> None:
    folder = place.run(status=states.RUNNING)
    say(folder, "".join(f"{n}\n" for n in range(20_000)))

    async def does(feeds: RunFeeds) -> None:
        page = Watcher(feeds.of(folder.run_id).watch(""))
        first = await page.line("19999")
        assert len(first["lines"]) == TAIL
        say(folder, "".join(f"{n}\n" for n in range(20_000, 40_000)))
        await page.line("39999")
        later = [value for event, value in page.told[1:] if event == "log"]
        assert all(len(value["lines"]) <= TAIL for value in later)
        assert sum(value["left_out"] + len(value["lines"]) for value in later) == 20_000
        await page.stream.aclose()  # type: ignore[attr-defined]

    watched(place, does)


def test_live_feed_of_an_ended_run_is_sent_once_and_not_polled(place: Place) -> None:
    folder = place.run()
    say(folder, "done\n")

    async def does(feeds: RunFeeds) -> None:
        feed = feeds.of(folder.run_id)
        page = Watcher(feed.watch(""))
        await page.until(lambda event, value: event == "end")
        assert page.lines() == ["done"]
        assert [data async for data in page.stream] == []
        # Without watchers, the feed stops reading. The next watcher starts a new feed.
        while not feed.is_idle:
            await asyncio.sleep(0.01)
        assert feeds.of(folder.run_id) is not feed

    watched(place, does)


def test_feed_ends_when_its_last_watcher_leaves(place: Place) -> None:
    folder = place.run(status=states.RUNNING)

    async def does(feeds: RunFeeds) -> None:
        feed = feeds.of(folder.run_id)
        page = Watcher(feed.watch(""))
        await page.until(lambda event, value: event == "state")
        await page.stream.aclose()  # type: ignore[attr-defined]
        while not feed.is_idle:
            await asyncio.sleep(0.01)

    watched(place, does)


def test_client_that_disconnects_while_its_feed_starts_leaves_no_log_file_open(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting, go_on = threading.Event(), threading.Event()
    begin = RunFeed._begin

    def slow_begin(feed: RunFeed) -> None:
        starting.set()
        assert go_on.wait(PATIENCE_S)
        begin(feed)

    monkeypatch.setattr(RunFeed, "_begin", slow_begin)
    folder = place.run(status=states.RUNNING)
    say(folder, "first\n")

    async def does(feeds: RunFeeds) -> None:
        feed = feeds.of(folder.run_id)
        watcher = asyncio.ensure_future(anext(feed.watch("")))
        assert await asyncio.to_thread(starting.wait, PATIENCE_S)
        watcher.cancel()
        await asyncio.sleep(0)
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await watcher
        assert feed._follower is None
        assert feed.is_idle

    watched(place, does)


def test_all_clients_of_a_run_share_one_poll(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    # Regression: each client that connected during the first poll started a separate feed, and 200 clients used a fifth
    # of a core.
    begun: list[RunFeed] = []
    begin = RunFeed._begin
    monkeypatch.setattr(RunFeed, "_begin", lambda feed: (begun.append(feed), begin(feed))[1])
    folder = place.run(status=states.RUNNING)
    say(folder, "first\n")

    async def does(feeds: RunFeeds) -> None:
        pages = [Watcher(feeds.of(folder.run_id).watch("")) for _ in range(20)]

        async def late(page: Watcher) -> None:
            await page.line("first")

        first = asyncio.gather(*map(late, pages))
        await asyncio.sleep(0)
        pages.append(Watcher(feeds.of(folder.run_id).watch("")))
        await first
        await pages[-1].line("first")
        for page in pages:
            await page.stream.aclose()  # type: ignore[attr-defined]

    watched(place, does)
    assert len(begun) == 1
