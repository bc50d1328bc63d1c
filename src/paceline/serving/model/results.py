"""What the user's code has returned, or raised, as answers."""

from __future__ import annotations

import sys
import time
import traceback
from typing import Any

from paceline.errors import ServingError
from paceline.serving.model.aml_names import AMLResponse
from paceline.serving.model.answers import FAILED_TEXT, OutputError, as_json, error
from paceline.serving.wire import Reply


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


def failed() -> Reply:
    """The answer after an exception of the script, which goes to the log."""
    traceback.print_exc()
    sys.stderr.flush()
    return error(500, FAILED_TEXT, in_script=True)


def batched(function: Any, items: list[Any], name: str) -> list[Reply]:
    """Give the function all items at once; where that fails, each alone, so that one can't spoil the others' answers."""
    if not items:
        return []
    before = time.perf_counter()
    try:
        results = list(function(items))
        if len(results) != len(items):
            raise ServingError(f"{name}() was given {len(items)} items and returned {len(results)} results.")
    except Exception:
        if len(items) == 1:
            return [failed()]
        return [reply for item in items for reply in batched(function, [item], name)]
    return [answered(result, before) for result in results]
