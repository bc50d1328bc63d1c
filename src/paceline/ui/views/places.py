"""Routes of the pages of models, services and compute targets, which update live."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paceline.runs.record import utc_now
from paceline.runs.search.facts import RunFacts
from paceline.runs.search.index import RunIndex
from paceline.targets import configured, polling
from paceline.targets.status_of_all import TargetLook, look_at_all
from paceline.ui import render
from paceline.ui.pieces import PagePiece, PiecesSeen, stamp_of
from paceline.ui.views import models, services
from paceline.ui.views.common import PATIENCE_S, pieces

#: Time limit in seconds for a target's answer.
LIMIT_S = 5.0
_PAUSE_S = 10.0  # minimum seconds between two queries of a target
#: Maximum number of runs that the page lists for each target.
_MOST_RUNS = 50

#: A function that returns the values for the template of a page in this module.
_Find = Callable[[Request], render.TemplateValues]
_Answer = Callable[[Request], Response]


def routes() -> list[Route]:
    """Return the routes of model, service and compute pages, including event streams."""
    pages: list[tuple[str, str, _Find]] = [
        ("/models", "models", models.listed),
        ("/models/{name}/{version:int}", "model", models.version),
        ("/services", "services", services.listed),
    ]
    listed = [
        # This page contains only the targets' names. Its event stream adds their status, for which an engine may need seconds.
        Route("/compute", _page("compute", _shell)),
        Route("/live/compute", _live("compute", targets)),
        Route("/models/{name}", _page("model_versions", models.versions)),
        *models.routes(),
        *services.routes(),
    ]
    for path, name, find in pages:
        listed += [Route(path, _page(name, find)), Route(f"/live{path}", _live(name, find))]
    return listed


def _page(name: str, find: _Find) -> _Answer:
    def page(request: Request) -> Response:
        values = find(request)
        return render.page(request, f"{name}.html", stamp=stamp_of(values), **values)

    return page


def _live(name: str, find: _Find) -> _Answer:
    def live(request: Request) -> Response:
        def look() -> PiecesSeen:
            values = find(request)
            piece = PagePiece(stamp_of(values), lambda: render.text(request, f"{name}_part.html", **values))
            return PiecesSeen({"main": piece})

        return pieces(request, look)

    return live


def _shell(request: Request) -> render.TemplateValues:
    return {"names": configured.names(request.app.state.workspace_dir)}


def targets(request: Request) -> render.TemplateValues:
    """Return each compute target's last status, and this workspace's runs on it."""
    watch: TargetWatch = request.app.state.targets
    index: RunIndex = request.app.state.index
    index.refresh_within(PATIENCE_S)
    going: dict[str, list[RunFacts]] = {}
    # List the oldest run first, as in a queue. Leave out sweeps and pipelines, because the list has their trials and steps.
    for entry in reversed(index.entries()):
        if not entry.is_terminal and entry.kind == "script":
            going.setdefault(entry.target, []).append(entry)
    own = {entry.run_id for entry in index.entries()}
    return {"targets": watch.seen(), "going": going, "own": own, "most": _MOST_RUNS}


@dataclass(frozen=True, kw_only=True)
class KeptExamination:
    """The last result of `paceline compute doctor` for a target.

    findings: (level, check and node, text, advice) of each finding.
    """

    time_utc: str
    result: str
    findings: tuple[tuple[str, str, str, str], ...]


@dataclass(frozen=True, kw_only=True)
class SeenTarget:
    """The last status of a compute target.

    look: The last answer of the target; None before the first answer. seen_utc: Time of that answer.
    down_since: Name of a node ("" for the target itself) -> time since which this server has seen it down.
    """

    name: str
    look: TargetLook | None = None
    seen_utc: str = ""
    down_since: dict[str, str] = field(default_factory=dict)
    examined: KeptExamination | None = None


class TargetWatch:
    """A watcher that asks compute targets for their status in the background."""

    def __init__(self, workspace_dir: Path) -> None:
        self._dir = workspace_dir
        self._seen: dict[str, SeenTarget] = {}
        self._busy: dict[str, threading.Thread] = {}
        self._next: dict[str, float] = {}

    def seen(self) -> list[SeenTarget]:
        """Return each compute target's last known status immediately, and start due queries."""
        names = configured.names(self._dir)
        for name in names:
            thread = self._busy.get(name)
            if (thread is None or not thread.is_alive()) and time.monotonic() >= self._next.get(name, 0.0):
                # Use a daemon thread, because a target may hang. The page then shows "no answer", and the server can exit.
                self._busy[name] = threading.Thread(target=self._look, args=(name,), daemon=True)
                self._busy[name].start()
        return [
            replace(
                self._seen.get(name, SeenTarget(name=name)),
                examined=examination(polling.kept(polling.doctor_path(self._dir, name))),
            )
            for name in names
        ]

    def _look(self, name: str) -> None:
        try:
            (look,) = look_at_all(self._dir, [name], LIMIT_S)
        # A target's plug-in may raise any exception. Show the exception, so that it does not end this thread.
        except Exception as error:
            look = TargetLook(name=name, kind=None, error=polling.said(error))
        before = self._seen[name].down_since if name in self._seen else {}
        down = {"": ""} if look.error else {}
        if look.status is not None:
            down |= {node.name: "" for node in look.status.nodes if not node.is_up}
        now = utc_now()
        since = {node: before.get(node, now) for node in down}
        self._seen[name] = SeenTarget(name=name, look=look, seen_utc=now, down_since=since)
        self._next[name] = time.monotonic() + _PAUSE_S


def examination(kept: dict[str, object]) -> KeptExamination | None:
    """Return a stored result of `paceline compute doctor`; None if invalid."""
    listed = kept.get("findings")
    if not isinstance(listed, list):
        return None
    findings = [
        (
            str(one.get("level")),
            " on ".join(str(one[name]) for name in ("check", "node") if one.get(name)),
            str(one.get("seen") or ""),
            str(one.get("advice") or ""),
        )
        for one in listed
        if isinstance(one, dict)
    ]
    return KeptExamination(time_utc=str(kept.get("time_utc")), result=str(kept.get("result")), findings=tuple(findings))
