"""Responses of a model process, and the JSON encoding of results."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import decimal
import enum
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from paceline.serving.wire import Reply

#: Body of the response to a request that raised an exception in user code. Only the log has the traceback.
FAILED_TEXT = "An unexpected error occurred in scoring script. Check the logs for more info."

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class InputError(Exception):
    """A mistake in a request that makes an answer impossible.

    The message is for the client, and `status` is the response's HTTP status.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class OutputError(Exception):
    """An error because JSON can't represent a result. The message names the value."""


def error(status: int, message: str, *, in_script: bool = False) -> Reply:
    """Return a response with an error in the format of Azure's server.

    in_script: Whether the script failed. Then the response has an additional header.
    """
    headers = [("content-type", "application/json"), *[("x-ms-run-function-failed", "True")] * in_script]
    return Reply(status, json.dumps({"message": message}).encode(), headers)


def refusal(reason: Exception) -> tuple[int, str]:
    """Return the status and message that refuse an unreadable request."""
    match reason:
        case InputError():
            return reason.status, str(reason)
        case RecursionError():
            return 400, "the body is nested too deeply."
    show(reason)
    return 400, "the request can't be read. Check the logs for more info."


def failure(raised: Exception, text: str) -> str:
    """Log a failure. Return an OutputError's message, else `text`."""
    if isinstance(raised, OutputError):
        print(f"paceline: {raised}", file=sys.stderr, flush=True)
        return str(raised)
    show(raised)
    return text


def in_protocol(body: bytes) -> bytes:
    """Convert an error's body from Azure's format to the Open Inference Protocol's."""
    message = json.loads(body)["message"]
    return json.dumps({"error": message, "message": message}).encode()


def message_of(body: bytes, longest: int = 300) -> str:
    """Return the message in an error response's JSON body, or the start of another body."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        if isinstance(message := json.loads(body)["message"], str):
            return message
    return body.decode("utf-8", errors="replace").strip()[:longest] or "nothing"


def parsed(body: bytes) -> Any:
    """Parse the JSON body of a request.

    Raises:
        InputError: The body is empty, not UTF-8, not JSON, nested too deeply, or has NaN or an infinity.
    """
    if not body:
        raise InputError("the body is empty; it should be JSON.")
    try:
        return json.loads(body, parse_constant=_no_constant)
    except UnicodeDecodeError as reason:
        raise InputError(f"the body is not UTF-8: {reason}.") from None
    except RecursionError:
        raise InputError("the body is nested too deeply.") from None
    except ValueError as reason:
        raise InputError(f"the body is not JSON: {reason}.") from None


def as_json(value: object) -> bytes:
    """Encode a result as JSON, with arrays, tensors, frames and dataclasses.

    Raises:
        OutputError: A value has no JSON form, such as NaN. The message says where in the result the value is.
    """
    try:
        return json.dumps(value, default=plain, allow_nan=False).encode()
    except RecursionError:
        raise OutputError("the result is nested too deeply, or holds itself.") from None
    except Exception as reason:
        # Search for the value that is not JSON only after the fast encoding has failed.
        where = _fault(value, "the result")
        raise OutputError(where or f"the result is not JSON: {reason}.") from None


def plain(value: Any) -> object:
    """Convert a value for JSON, as the argument `default` of `json.dumps`."""
    # Recognize values by their methods instead of their classes, so that this module imports no library.
    for name in ("tolist", "to_pylist"):  # `tolist` of numpy and torch, `to_pylist` of pyarrow
        method = getattr(value, name, None)
        if callable(method):
            return value.detach().tolist() if getattr(value, "requires_grad", False) else method()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    if callable(getattr(value, "to_dict", None)):  # a frame of pandas or polars
        try:
            return value.to_dict(orient="records")
        except TypeError:
            return value.to_dict()
    for kinds, convert in _CONVERTED:
        if isinstance(value, kinds):
            return convert(value)
    raise TypeError(f"a value of type {type(value).__name__} is not JSON")


def _no_bytes(value: bytes | bytearray) -> NoReturn:
    raise TypeError("bytes are no JSON; return AMLResponse, or encode them as base64")


#: Type -> function that converts its values for JSON. The first type that fits is used.
_CONVERTED: tuple[tuple[type | tuple[type, ...], Callable[[Any], object]], ...] = (
    (enum.Enum, lambda value: value.value),
    ((dt.datetime, dt.date, dt.time), lambda value: value.isoformat()),
    (decimal.Decimal, float),
    (Mapping, dict),
    (os.PathLike, os.fspath),
    ((bytes, bytearray), _no_bytes),
    (Iterable, list),
)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _fault(value: object, where: str) -> str | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{where} is {value}, which JSON has not."
    if value is None or isinstance(value, (str, int, bool)):
        return None
    if isinstance(value, Mapping):
        for key, each in value.items():
            if not (key is None or isinstance(key, (str, int, float, bool))):
                return f"{where} has the key {key!r} of type {type(key).__name__}, which JSON has not."
            if fault := _fault(each, f"{where}[{key!r}]"):
                return fault
        return None
    if isinstance(value, (list, tuple)):
        return next((fault for at, each in enumerate(value) if (fault := _fault(each, f"{where}[{at}]"))), None)
    try:
        return _fault(plain(value), where)
    except Exception as reason:
        return f"{where}: {' '.join(str(reason).split()) or type(reason).__name__}."


def show(error: BaseException) -> None:
    """Print an exception and its traceback, beginning at the first user code."""
    at = error.__traceback__
    while at is not None and at.tb_frame.f_code.co_filename.startswith((_OURS, "<frozen")):
        at = at.tb_next
    # If no frame belongs to user code, show all frames. Show none for a SyntaxError, because its message has the location.
    whole = None if isinstance(error, SyntaxError) else error.__traceback__
    traceback.print_exception(type(error), error, at or whole)
    sys.stderr.flush()
