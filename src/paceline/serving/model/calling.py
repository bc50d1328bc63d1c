"""Call the function of a scoring script, for one request or for several."""

from __future__ import annotations

import inspect
import json
import re
import time
import urllib.parse
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from paceline.errors import ServingError
from paceline.serving.config import ServerConfig
from paceline.serving.model.aml_names import AMLResponse
from paceline.serving.model.answers import FAILED_TEXT, InputError, OutputError, as_json, error, failure, refusal
from paceline.serving.wire import INFER, ModelCall, Reply

#: The characters of a header by RFC 9110, sections 5.1 and 5.5.
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+: [\t\x20-\x7e\x80-\xff]*")


class Script:
    """A loaded script, whose function `name` answers requests.

    If the script has a function `<name>_batch` too, one call of it gets up to `max_batch` waiting requests.
    """

    wants_head = False

    def __init__(self, module: ModuleType, name: str, config: ServerConfig) -> None:
        self._function = getattr(module, name)
        self._many_name = f"{name}_batch"
        self._many: Any = getattr(module, self._many_name, None)
        self.is_batched = self._many is not None and config.max_batch > 1

    def _arguments(self, call: ModelCall) -> dict[str, object]:
        raise NotImplementedError

    def _item(self, arguments: dict[str, object]) -> object:
        return arguments

    def _failed(self, raised: Exception) -> Reply:
        return _failed(raised)

    def answer(self, calls: Sequence[ModelCall]) -> list[Reply]:
        """Return a response to each request, an error for an invalid request."""
        items: list[dict[str, object]] = []
        replies: list[Reply | None] = []
        for call in calls:
            try:
                if call.operation == INFER:
                    raise InputError("a scoring script has no tensors; POST to /score.", 404)
                items.append(self._arguments(call))
                replies.append(None)
            except Exception as reason:
                replies.append(error(*refusal(reason)))
        results = iter(self._together(list(map(self._item, items))) if self.is_batched else map(self._alone, items))
        return [reply if reply is not None else next(results) for reply in replies]

    def _alone(self, arguments: dict[str, object]) -> Reply:
        before = time.perf_counter()
        try:
            result = self._function(**arguments)
        except Exception as raised:
            return self._failed(raised)
        return _answered(result, before)

    def _together(self, items: list[object]) -> list[Reply]:
        """Return the batch function's replies. If it fails, call it with each item alone."""
        if not items:
            return []
        before = time.perf_counter()
        try:
            results = list(self._many(items))
            if len(results) != len(items):
                raise ServingError(
                    f"{self._many_name}() was given {len(items)} items and returned {len(results)} results."
                )
        except Exception as raised:
            if len(items) == 1:
                return [_failed(raised)]
            return [reply for item in items for reply in self._together([item])]
        return [_answered(result, before) for result in results]


def _answered(result: Any, before: float) -> Reply:
    ran_us = int((time.perf_counter() - before) * 1e6)
    try:
        if isinstance(result, AMLResponse):
            return _checked(result.reply(ran_us))
        if callable(getattr(result, "get_wsgi_response", None)):  # a Response object of Flask
            headers = [(name, value) for name, value in result.headers.items() if name.lower() != "content-length"]
            return _checked(Reply(result.status_code, result.get_data(), headers, ran_us))
        return Reply(200, as_json(result), [], ran_us)
    except Exception as raised:
        return _failed(raised)


def _checked(reply: Reply) -> Reply:
    """Return the response, or raise OutputError if HTTP can't send it."""
    if not 200 <= reply.status <= 599:
        raise OutputError(f"the result has the HTTP status {reply.status}. Write 200 to 599.")
    for name, value in reply.headers:
        if not _HEADER.fullmatch(f"{name}: {value}"):
            raise OutputError(f"the result has the header {name!r}: {value!r}. Write it in Latin-1, on one line.")
    return reply


def _failed(raised: Exception) -> Reply:
    return error(500, failure(raised, FAILED_TEXT), in_script=True)


def values_of(call: ModelCall) -> dict[str, object]:
    """Return the parameters of a request's query, parsed as JSON where possible."""
    values: dict[str, list[object]] = {}
    for name, text in urllib.parse.parse_qsl(call.head.get("query", ""), keep_blank_values=True):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = text
        values.setdefault(name, []).append(value)
    return {name: values_given[0] if len(values_given) == 1 else values_given for name, values_given in values.items()}


def parameters(function: Callable[..., object], path: str) -> list[inspect.Parameter]:
    """Return the parameters of a function, if all of them can be passed by name.

    Raises:
        ServingError: A parameter can't be passed by name.
    """
    listed = list(inspect.signature(function).parameters.values())
    for each in listed:
        if each.kind not in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD):
            raise ServingError(
                f"{path}: {getattr(function, '__name__', 'run')}() takes {each}, which can't be given by a name. Write plain "
                "parameters, without *, ** and /."
            )
    return listed
