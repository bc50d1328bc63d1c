"""Check notifications of a run: their forms, events, and secret parts.

    slack:env:SLACK_URL     teams:keyring:hooks/me     webhook:file:~/.hook     ntfy:env:TOPIC_URL     apprise:env:MATRIX_URL
    mail:ann@example.com    command:./told.sh --all

The URL of a chat is a secret, because every person who has it can post. So a job has only the URL's source, such as env:NAME.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from paceline.errors import JobError
from paceline.job.secret_values import hidden, is_place
from paceline.system.names import did_you_mean

#: Kinds of receivers of notifications whose address is a secret.
HOOKS = ("slack", "teams", "webhook", "ntfy", "apprise")
FORMS = f"{', '.join(f'{kind}:PLACE' for kind in HOOKS)}, mail:ADDRESS, command:WORDS"
#: Events that send messages: the run has left the queue, started, ended or failed, it hangs, its user is over quota, or a
#: sweep has a new best trial.
NotifyEvent: TypeAlias = Literal["allocated", "start", "end", "failure", "hang", "quota", "best"]
EVENTS: tuple[NotifyEvent, ...] = get_args(NotifyEvent)
DEFAULT_EVENTS: tuple[NotifyEvent, ...] = ("end", "hang")

_COMPARES = re.compile(r"[<>=]|\bin\b")
_ADDRESS = re.compile(r"[^\s@,;:<>()\[\]\\\"-][^\s@,;:<>()\[\]\\\"]*@[^\s@,;:<>()\[\]\\\"]+")


def check_notify(given: object) -> tuple[str, ...]:
    """Return the notifications if they are valid, with absolute paths of commands.

    Raises:
        JobError: A notification is invalid. The message shows no URL.
    """
    if isinstance(given, str) or not isinstance(given, (list, tuple)):
        raise JobError(f"notify={given!r} is not a list of texts. Write notify=['mail:ann@example.com'].")
    for one in given:
        if not isinstance(one, str):
            raise JobError(f"notify has {one!r}, which is not a text. Write one of {FORMS}.")
        _check(one)
    return tuple(_absolute(one) for one in given)


def check_notify_on(given: object) -> tuple[str, ...]:
    """Return the events and conditions if they are valid. Submission parses the conditions.

    Raises:
        JobError: An event is unknown.
    """
    if isinstance(given, str) or not isinstance(given, (list, tuple)):
        raise JobError(f"notify_on={given!r} is not a list of events. Write notify_on=['end', 'hang'].")
    for one in given:
        if one not in EVENTS and not (isinstance(one, str) and is_condition(one)):
            near = did_you_mean(str(one), EVENTS)
            raise JobError(
                f"notify_on={one!r} is not an event. Write one of {', '.join(EVENTS)}, or a condition on metrics, such as "
                f"'metrics.loss > 10'.{near}"
            )
    return tuple(given)


def is_condition(event: str) -> bool:
    """Return whether an event is a condition on metrics, such as "metrics.loss > 10"."""
    return _COMPARES.search(event) is not None


def check_no_conditions(notify_on: Sequence[str], kind: str) -> None:
    """Refuse conditions on metrics: a sweep or pipeline has no metrics of its own.

    Raises:
        JobError: `notify_on` has a condition.
    """
    for one in filter(is_condition, notify_on):
        raise JobError(f"notify_on={one!r}: a {kind} has no metrics of its own. Write it for a single run.")


def check_programs(notify: Sequence[str], *, is_here: bool) -> None:
    """Check that the programs that send these notifications are installed.

    Check apprise if a notification needs it, and commands if the supervisor runs on this machine (`is_here`).

    Raises:
        JobError: apprise is missing, or a command is missing or cannot be run.
    """
    import importlib.util

    if any(one.startswith("apprise:") for one in notify) and importlib.util.find_spec("apprise") is None:
        raise JobError("apprise: in notify needs the package apprise: pip install 'paceline[notify]'.")
    for one in notify if is_here else ():
        kind, _, rest = one.partition(":")
        program = shlex.split(rest)[0] if kind == "command" else ""
        if program and shutil.which(program) is None:
            what = "is not there, or can't be run (chmod +x)" if "/" in program else "is not a program on the PATH"
            raise JobError(f"notify={one!r}: {program!r} {what}. Correct it.")


def is_url(address: str) -> bool:
    return address.startswith(("https://", "http://"))


def check_address(one: str, address: str) -> None:
    """Raise JobError if a webhook's address is not a URL. The message does not show the address."""
    if not (one.startswith("apprise:") or is_url(address)):
        raise JobError(f"notify={one!r}: the value at this place is not a URL that begins with https:// or http://.")


def place_of(one: str) -> str | None:
    """Return a notification's URL source, such as "env:SLACK_URL"; None for mail and commands."""
    kind, _, rest = one.partition(":")
    return rest if kind in HOOKS else None


def key_of(one: str) -> str:
    """Return the key under which a run's secrets hold a notification's URL."""
    return f"notify {one}"  # the key contains a space, so that it never equals a variable's name


def _absolute(one: str) -> str:
    kind, _, rest = one.partition(":")
    if kind != "command":
        return one
    program, *words = shlex.split(rest)
    if "/" not in program or os.path.isabs(program):
        return one
    return f"command:{shlex.join([os.path.abspath(os.path.expanduser(program)), *words])}"


def _check(one: str) -> None:
    kind, _, rest = one.partition(":")
    if hidden(one) != one if kind == "command" else "://" in one:
        raise JobError(
            "notify: a webhook's URL is a secret, and is not recorded or shown. Name the place that holds it: "
            "slack:env:SLACK_URL, with the URL in that variable of your shell (or keyring:service/user, file:PATH)."
        )
    if kind in HOOKS:
        if not is_place(rest):
            raise JobError(
                f"notify: {kind}: is followed by the place of the URL, which is a secret and not shown here: "
                f"{kind}:env:VARIABLE, {kind}:keyring:service/user or {kind}:file:PATH."
            )
    elif kind == "mail":
        if not _ADDRESS.fullmatch(rest):
            raise JobError(f"notify={one!r}: {rest!r} is not an address. Write mail:ann@example.com.")
    elif kind == "command":
        try:
            words = shlex.split(rest)
        except ValueError as error:
            raise JobError(f"notify={one!r}: {error}.") from None
        if not words:
            raise JobError(f"notify={one!r} has no command. Write command:./told.sh.")
    else:
        # Show only a plain word: any other text may be a webhook's address without its scheme.
        shown = repr(kind) if kind.isalpha() and len(kind) <= 16 else "what was given (not shown: it may be a secret)"
        raise JobError(f"notify: {shown} is unknown. Write one of {FORMS}.")
