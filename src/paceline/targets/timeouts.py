"""Calls that may never return, several at once, waited for only so long.

Their threads are daemons and not a pool's: a pool's are waited for when the program ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

from paceline.errors import PacelineError

Name = TypeVar("Name", bound=Hashable)
Result = TypeVar("Result")


def all_within(calls: Mapping[Name, Callable[[], Result]], limit_s: float) -> dict[Name, Result | Exception]:
    """Make all calls at once; what each returns or raises, TimeoutError for one that takes longer than `limit_s`.

    Such a call goes on in the background; what it brings is lost.
    """
    answers: dict[Name, Result | Exception] = {}

    def make(name: Name, call: Callable[[], Result]) -> None:
        try:
            answer: Result | Exception = call()
        except Exception as error:  # whoever asked decides what it means
            answer = error
        # One assignment under the interpreter's lock, so nobody sees half an answer.
        answers[name] = answer

    threads = [threading.Thread(target=make, args=item, daemon=True) for item in calls.items()]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    # Read once: an answer that comes after this moment counts as late.
    late = TimeoutError(f"no answer in {limit_s:g} s")
    return {name: answers.get(name, late) for name in calls}


def within(call: Callable[[], Result], limit_s: float) -> Result | Exception:
    """Make one call as `all_within` does."""
    return all_within({"": call}, limit_s)[""]


def said(error: Exception) -> str:
    """The text of an error, with its name where it is not one of Paceline's own."""
    return str(error) if isinstance(error, (PacelineError, TimeoutError)) else f"{type(error).__name__}: {error}"
