"""What the user's code has returned, or raised, as answers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.errors import ServingError
from paceline.serving.model.aml_names import AMLResponse
from paceline.serving.model.answers import FAILED_TEXT, InputError, OutputError, as_json, error
from paceline.serving.model.tracebacks import show
from paceline.serving.wire import ModelCall, Reply


def answered(result: Any, before: float) -> Reply:
    """What the script has returned, as an answer. before: when it was called."""
    ran_us = int((time.perf_counter() - before) * 1e6)
    if isinstance(result, AMLResponse):
        return result.reply(ran_us)
    if callable(getattr(result, "get_wsgi_response", None)):  # a script that brings Flask may answer with its Response
        headers = [(name, value) for name, value in result.headers.items() if name.lower() != "content-length"]
        return Reply(result.status_code, result.get_data(), headers, ran_us)
    try:
        return Reply(200, as_json(result), [], ran_us)
    except OutputError as reason:
        print(f"paceline: {reason}", file=sys.stderr, flush=True)
        return error(500, str(reason), in_script=True)


def failed(raised: Exception) -> Reply:
    """The answer after an exception of the script, which goes to the log."""
    show(raised)
    return error(500, FAILED_TEXT, in_script=True)


def of_each(calls: Sequence[ModelCall], take: Callable[[ModelCall], Any], function: Any, name: str) -> list[Reply]:
    """The answer to each call, by a function of all that `take` has read of them; to what it refuses, the reason."""
    items: list[Any] = []
    replies: list[Reply | None] = []
    for call in calls:
        try:
            items.append(take(call))
            replies.append(None)
        except InputError as reason:
            replies.append(error(reason.status, str(reason)))
    results = iter(batched(function, items, name))
    return [reply if reply is not None else next(results) for reply in replies]


def batched(function: Any, items: list[Any], name: str) -> list[Reply]:
    """Give the function all items at once; where that fails, each alone, so that one can't spoil the others' answers."""
    if not items:
        return []
    before = time.perf_counter()
    try:
        results = list(function(items))
        if len(results) != len(items):
            raise ServingError(f"{name}() was given {len(items)} items and returned {len(results)} results.")
    except Exception as raised:
        if len(items) == 1:
            return [failed(raised)]
        return [reply for item in items for reply in batched(function, [item], name)]
    return [answered(result, before) for result in results]
