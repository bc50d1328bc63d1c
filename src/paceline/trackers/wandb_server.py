"""Relay a run to a W&B server without W&B's package.

Paceline sends two kinds of requests, as W&B's own client does. A repetition of either is harmless:

    POST /graphql                                      the mutation upsertBucket: name, parameters, tags
    POST /files/<entity>/<project>/<run>/file_stream   {"files": {"wandb-history.jsonl": {"offset": 7, "content": [lines]}}}

The server stores each line under its number; the first line has the number `offset`.
https://github.com/wandb/wandb/tree/main/core/internal/filestream
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import netrc
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import TypedDict, cast
from urllib.parse import quote, urlsplit

from paceline.errors import RunNotFoundError, UserError
from paceline.runs import read, states
from paceline.runs.folder import RunFolder
from paceline.runs.search.facts import RunFacts, read_record_facts
from paceline.runs.search.summaries import SummaryReader
from paceline.runs.visible import visible
from paceline.trackers.relay import CutError, SentValue

_HISTORY, _SUMMARY = "wandb-history.jsonl", "wandb-summary.json"
_TARGET = re.compile(r"(?:(?P<entity>[\w.-]{1,128})/)?(?P<project>[^/\\#?%:\s][^/\\#?%:\n]{0,127})")
#: Pattern of a URL without user name and password, because messages contain the URL.
_BASE = re.compile(r"https?://[^\s/@?#]+(?:/[^\s@?#]*)?")
_KEY = re.compile(r"[\w.-]{8,1024}", re.ASCII)
#: HTTP status codes below 500 after which this client retries, as W&B's client does. It also retries after codes from 500 on.
_PASSING = (408, 409, 429)
_ANSWER_S, _ANSWER_BYTES = 30.0, 1 << 22
#: W&B's limits: maximum characters of a run's id, and of a tag.
_ID_LENGTH, _TAG_LENGTH = 64, 64
_UPSERT = """
mutation UpsertBucket($name: String, $project: String, $entity: String, $groupName: String, $displayName: String,
                      $notes: String, $config: JSONString, $tags: [String!]) {
  upsertBucket(input: {name: $name, modelName: $project, entityName: $entity, groupName: $groupName,
                       displayName: $displayName, notes: $notes, config: $config, tags: $tags}) {
    bucket { id historyLineCount project { name entity { name } } }
    inserted
  }
}
"""


class _Named(TypedDict):
    name: str


class _Project(_Named):
    entity: _Named


class _Bucket(TypedDict):
    id: str
    historyLineCount: int | None
    project: _Project


class _Upserted(TypedDict):
    bucket: _Bucket
    inserted: bool | None


class WandbServer:
    """A client that stores one run on the W&B server WANDB_BASE_URL (default: https://api.wandb.ai)."""

    #: Pause in seconds between two requests. W&B's own client pauses for the same time, so the server's rate limit permits it.
    look_s = 15.0

    def __init__(self, folder: RunFolder, target: str) -> None:
        """Check the target (PROJECT or ENTITY/PROJECT), and find the API key.

        Raises:
            UserError: The target or the address is invalid, or there is no key.
        """
        found = _TARGET.fullmatch(target)
        if found is None:
            raise UserError(f"--to 'wandb={visible(target)}': write wandb=PROJECT or wandb=ENTITY/PROJECT.")
        self._base = (os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").rstrip("/")
        if not _BASE.fullmatch(self._base):
            raise UserError(
                "WANDB_BASE_URL is no address of a server. Write one such as https://wandb.lab.example.com."
            )
        key = os.environ.get("WANDB_API_KEY") or _key_of_netrc(urlsplit(self._base).netloc)
        if not _KEY.fullmatch(key):
            problem = "has characters that no key has" if key else "is missing"
            raise UserError(f"The API key of {self._base} {problem}. Set WANDB_API_KEY, or call `wandb login`.")
        self._token = base64.b64encode(f"api:{key}".encode()).decode()
        self._folder, self._summaries = folder, SummaryReader(folder.metrics)
        self._entity, self._project = found["entity"], found["project"]
        self.to = f"wandb={target} ({self._base})"
        run_id = folder.run_id
        self._run = run_id if len(run_id) <= _ID_LENGTH else sha256(run_id.encode()).hexdigest()[:32]
        self._started_s = 0.0
        #: The description that the server has confirmed last; `_summary`: the summary; `_stream`: the run's path there.
        self._described: Mapping[str, object] = {}
        self._summary = ""
        self._stream = ""

    @property
    def url(self) -> str:
        """The URL of the run's page on the server."""
        entity, project = (quote(str(part)) for part in (self._entity, self._project))
        return f"{self._base.replace('//api.wandb.ai', '//wandb.ai')}/{entity}/{project}/runs/{quote(self._run)}"

    def open(self, key: str | None) -> str:
        upserted = self._upsert(self._description(self._facts()))
        if key is not None and upserted.get("inserted"):
            raise UserError(f"Run {self._run} was deleted at {self.url}. Relay it to another project.")
        if key is None and upserted["bucket"].get("historyLineCount"):
            raise UserError(
                f"Run {self._run} has values at {self.url} that this relay did not send. Use another project."
            )
        return upserted["bucket"]["id"]

    def send(self, values: list[SentValue], line: int, *, is_doubtful: bool) -> int:
        lines = [
            json.dumps({**row, "_step": number, "_runtime": max(0.0, row["_timestamp"] - self._started_s)})
            for number, row in enumerate(_rows(values), line)
        ]
        self._post(self._stream, {"files": {_HISTORY: {"offset": line, "content": lines}}})
        return len(lines)

    def show_alive(self) -> None:
        """Send changes of the description and summary, or else a heartbeat."""
        facts = self._facts()
        if (description := self._description(facts)) != self._described:
            self._upsert(description)
        last = {name: summary.last for name, summary in facts.metrics.items()}
        summary = json.dumps(last)
        if summary == self._summary or not last:
            self._post(self._stream, {})
        else:
            self._post(self._stream, {"files": {_SUMMARY: {"offset": 0, "content": [summary]}}})
            self._summary = summary

    def finish(self) -> None:
        record = read.record(self._folder)
        code = 0 if record.status == states.COMPLETED else record.exit_code or 1
        self._post(self._stream, {"complete": True, "exitcode": code})

    def _facts(self) -> RunFacts:
        facts = read_record_facts(self._folder)
        if facts is None:
            raise RunNotFoundError(
                f"Run {self._folder.run_id} has no readable record any more. It was deleted or moved."
            )
        facts.metrics = self._summaries.look()
        self._started_s = facts.started or facts.created or 0.0
        return facts

    def _description(self, facts: RunFacts) -> dict[str, object]:
        # W&B's own step counts lines. So use the metric "step" as x axis of charts. The keys are field numbers of MetricRecord.
        metrics = [{"1": "step"}, *({"1": name, "5": 1, "6": [1, 3]} for name in facts.metrics if name != "step")]
        values: dict[str, object] = {**facts.params, "_wandb": {"m": metrics, "t": {}}}
        tags = [key if value is None else f"{key}={value}" for key, value in facts.tags.items()]
        return {
            "name": self._run,
            "project": self._project,
            "entity": self._entity,
            "groupName": facts.experiment,
            "displayName": facts.title,
            "notes": facts.description or None,
            "config": json.dumps({name: {"value": value} for name, value in values.items()}),
            "tags": [tag[:_TAG_LENGTH] for tag in tags],
        }

    def _upsert(self, description: dict[str, object]) -> _Upserted:
        answer = self._post("/graphql", {"query": _UPSERT, "variables": description})
        try:
            upserted = cast("_Upserted", answer["data"]["upsertBucket"])  # type: ignore[index]
            bucket = upserted["bucket"]
            self._entity, self._project = bucket["project"]["entity"]["name"], bucket["project"]["name"]
        except (KeyError, TypeError):
            raise UserError(f"{self._base} refuses run {self._run}: {_text(answer)}") from None
        path = "/".join(quote(part, safe="") for part in (self._entity, self._project, self._run))
        self._stream = f"/files/{path}/file_stream"
        self._described = {**description, "entity": self._entity, "project": self._project}
        return upserted

    def _post(self, path: str, body: Mapping[str, object]) -> Mapping[str, object]:
        url, data = self._base + path, b""
        headers = {"Content-Type": "application/json", "User-Agent": "paceline"}
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        # urllib does not send this header to the target of a redirect.
        request.add_unredirected_header("Authorization", f"Basic {self._token}")
        try:
            with urllib.request.urlopen(request, timeout=_ANSWER_S) as response:
                address, data = response.geturl(), response.read(_ANSWER_BYTES)
            answer = json.loads(data or b"{}")
        except urllib.error.HTTPError as error:
            with error, contextlib.suppress(OSError, http.client.HTTPException):
                data = error.read(1000)
            if error.code >= 500 or error.code in _PASSING:
                raise CutError(f"it answered {error.code}") from None
            if error.code == 401:
                raise UserError(f"{self._base} refuses the key. Set WANDB_API_KEY, or call `wandb login`.") from None
            text = _text(data.decode(errors="replace"))
            raise UserError(f"{self._base} refuses run {self._run}: {error.code} {text}") from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise CutError(str(getattr(error, "reason", error))) from None
        if address != url:
            raise UserError(f"{self._base} redirects to {visible(address)}. Set WANDB_BASE_URL to the final address.")
        return cast("Mapping[str, object]", answer)


def _rows(values: list[SentValue]) -> Iterator[dict[str, float]]:
    """Yield W&B's history lines as name -> value; values of one step share a line."""
    row: dict[str, float] = {}
    for name, value, time_ms, step in values:
        if row and (row["step"] != step or name in row):
            yield row
            row = {}
        row |= {"step": step, name: value, "_timestamp": time_ms / 1000}
    yield row


def _key_of_netrc(host: str) -> str:
    """Return the API key that `wandb login` stored for a host, or ""."""
    try:
        found = netrc.netrc(os.environ.get("NETRC")).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        return ""
    return found[2] or "" if found else ""


def _text(answer: object) -> str:
    """Return a GraphQL response's error messages, or another response's beginning."""
    if isinstance(answer, Mapping) and isinstance(errors := answer.get("errors"), list):
        answer = "; ".join(str(error.get("message")) for error in errors if isinstance(error, Mapping))
    return visible(" ".join(str(answer).split())[:300])
