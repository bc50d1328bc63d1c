"""Send notifications of runs and services in parallel, by webhooks, sendmail and commands, each for at most a minute.

A run's supervisor sends the notifications. If the supervisor was killed, another process takes the run's lock, records
the run's end, and notifies the receivers of the end.

Slack: https://api.slack.com/messaging/webhooks. Teams: an Adaptive Card, for the workflows that replaced connectors,
https://learn.microsoft.com/power-automate/teams/create-adaptive-cards. ntfy: https://docs.ntfy.sh/publish/.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from email.message import EmailMessage
from pathlib import Path

from paceline.job.notify import is_condition, is_url, key_of, place_of
from paceline.runs import states, tags_and_properties
from paceline.runs.folder import RunFolder, has_own_record
from paceline.runs.record import RunRecord, end_text, hang_status
from paceline.runs.visible import visible
from paceline.system import processes
from paceline.system.files import append_line, json_lines, read_json
from paceline.system.names import some

_HOOK_S = 10.0
_COMMAND_S = 60.0
#: A notification quotes at most this many lines of the failure report.
_LINES = 15
#: The usual paths of sendmail, which a batch job's PATH may lack.
_SENDMAIL = ("/usr/sbin/sendmail", "/usr/lib/sendmail")


def tell(folder: RunFolder, record: RunRecord, event: str, digest: str = "") -> list[str]:
    """Send the notifications of a run's event. Return a sentence for each failure.

    Each receiver gets one notification of the run's end, even if another process than the supervisor records the end.
    The returned sentences contain no URL.

    record: The record that will be written after this call. Its job names the receivers.
    digest: Further text of the message, such as the results of a sweep; "" for none.
    """
    events = {event, "failure"} if record.status == states.FAILED else {event}
    is_once = record.is_terminal or is_condition(event)
    told = list(json_lines(folder.told)) if is_once else []
    wanted = [one for one, on in record.receivers.items() if events & on and _heard(one, record, event) not in told]
    if not wanted:
        return []
    said = of_run(folder, record, event, digest)
    # Don't notify if another user may have written the record: it may name a command of that user as a receiver.
    if not has_own_record(folder):
        return [_sentence(said, one, "another user wrote the run's record.") for one in wanted]
    addresses = read_json(folder.secrets) or {}

    def heard(one: str) -> None:
        if is_once:
            with contextlib.suppress(OSError):  # on a full disk, another process may repeat the notification
                append_line(folder.told, _heard(one, record, event))

    # A receiver's URL has the key `key_of(receiver)` in a run's secrets, `place_of(receiver)` in a pipeline's.
    found = {one: addresses.get(key_of(one)) or addresses.get(place_of(one)) for one in wanted}
    return send(said, found, heard)


def send(said: Notification, receivers: Mapping[str, str | None], heard: Callable[[str], object] = bool) -> list[str]:
    """Send a notification to all receivers in parallel. Return a sentence per failure.

    receivers: Receiver -> URL of its webhook; None for mail and commands. heard: Called with each receiver that got the
        notification.
    """

    def told(one: str) -> str | None:
        why = _told(one, said, receivers[one])
        if why is None:
            heard(one)
        return why

    with ThreadPoolExecutor(len(receivers) or 1) as pool:
        return [_sentence(said, one, why) for one, why in zip(receivers, pool.map(told, receivers), strict=True) if why]


def _sentence(said: Notification, receiver: str, why: str) -> str:
    return f"no message to {receiver} about {said.topic}: {why}"


def _heard(receiver: str, record: RunRecord, event: str) -> dict[str, str]:
    return {"to": receiver, "status": event if is_condition(event) else record.status}


@dataclass(frozen=True, kw_only=True)
class Notification:
    """A message about a run or a service, for webhooks, mail and commands.

    Attributes:
        title: First line of the message.
        topic: The event in words, such as "the run's end", for error sentences.
        report: Lines of the failure report; "" without a failure.
        facts: Names and values that follow the report.
        data: The message as JSON, for programs.
        folder: Working directory of notification commands.
        variables: Environment variables of notification commands.
    """

    title: str
    topic: str
    report: str
    facts: Mapping[str, str]
    data: Mapping[str, object]
    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """Return the whole message as plain text, title included."""
        return f"{self.title}\n\n{self.body()}"

    def body(self) -> str:
        """Return the message as plain text without its title."""
        facts = "\n".join(f"{name}: {value}" for name, value in self.facts.items() if value)
        return f"{self.report}\n\n{facts}" if self.report else facts

    def to_json(self) -> dict[str, object]:
        return {**self.data, "text": self.text()}


def of_run(folder: RunFolder, record: RunRecord, event: str, digest: str = "") -> Notification:
    """Return the notification of a run's event, with the failure report's first lines."""
    name = tags_and_properties.read(folder.notes).name or record.run_id
    words = record.hang["text"] if record.hang and event == "hang" else record.failure or ""
    failure = {"cause": record.failure.cause, "message": record.failure.message} if record.failure else None
    return Notification(
        title=visible(f"{name}: {_news(record, event)}"),
        topic=visible(event) if is_condition(event) else f"the run's {event}",
        report="\n\n".join(filter(None, (first_lines(str(words)), visible(digest, lines=True)))),
        facts={
            "run": record.run_id,
            "experiment": record.experiment,
            "target": record.target or "",
            "more": f"paceline show {record.run_id}",
        },
        data={
            "run_id": record.run_id,
            "event": event,
            "display_name": name,
            "experiment": record.experiment,
            "status": record.status,
            "target": record.target,
            "exit_code": record.exit_code,
            "duration_s": record.duration_s,
            "failure": failure,
        },
        folder=folder.path,
        variables={
            "PACELINE_RUN_ID": record.run_id,
            "PACELINE_RUN_DIR": str(folder.path),
            "PACELINE_RUN_STATUS": record.status,
        },
    )


def first_lines(report: str) -> str:
    """Return the first lines of a report, with "..." if lines are missing."""
    lines = visible(report, lines=True).splitlines()
    return "\n".join([*lines[:_LINES], *(["..."] if len(lines) > _LINES else [])])


def _news(record: RunRecord, event: str) -> str:
    if is_condition(event):
        return event
    if record.is_terminal:
        return end_text(record)
    if event == "best":
        return "new best trial"
    if event in ("quota", "allocated"):
        return f"{record.status}, {record.waiting_for or 'it has left the queue'}"
    on = f" on {some(record.attempts[-1].nodes, 3)}" if event == "start" and record.attempts else ""
    return f"{hang_status(record)}{on}"


def slack_message(said: Notification) -> dict[str, object]:
    """Return the message in Slack's format: a bold title and a code block."""

    def plain(text: str) -> str:
        return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

    report = f"\n```{plain(said.report.replace('```', ' ` ` ` '))}```" if said.report else ""
    facts = "\n".join(plain(f"{name}: {value}") for name, value in said.facts.items() if value)
    return {"text": f"*{plain(said.title)}*{report}\n{facts}"}


def teams_message(said: Notification) -> dict[str, object]:
    """Return the message in the format of a Teams workflow."""
    body: list[dict[str, object]] = [{"type": "TextBlock", "text": said.title, "weight": "Bolder", "wrap": True}]
    if said.report:
        body.append({"type": "TextBlock", "text": said.report, "fontType": "Monospace", "wrap": True})
    facts = [{"title": name, "value": value} for name, value in said.facts.items() if value]
    body.append({"type": "FactSet", "facts": facts})
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": body,
    }
    return {
        "type": "message",
        "attachments": [{"contentType": "application/vnd.microsoft.card.adaptive", "content": card}],
    }


_MESSAGES: dict[str, Callable[[Notification], object]] = {
    "slack": slack_message,
    "teams": teams_message,
    "webhook": Notification.to_json,
    "ntfy": Notification.text,
}


def _told(one: str, said: Notification, address: str | None) -> str | None:
    """Send a notification to receiver `one`. Return a sentence about the failure, or None."""
    kind, _, rest = one.partition(":")
    try:
        if kind == "mail":
            return _mail(rest, said)
        if kind == "command":
            return _command(shlex.split(rest), said)
        if address is None:
            return "its URL is not in the run's folder any more."
        return _apprise(address, said) if kind == "apprise" else _post(address, _MESSAGES[kind](said))
    # Catch every error, because an error here must not change the run's end.
    except Exception as error:
        return f"{type(error).__name__}."


def _apprise(url: str, said: Notification) -> str | None:
    import logging
    import re

    import apprise

    # apprise's warnings may contain the URL. Without a handler for apprise's logger, Python prints these warnings.
    log = logging.getLogger("apprise")
    if log.propagate:
        log.propagate = False
        log.addHandler(logging.NullHandler())
    sender = apprise.Apprise()
    if not sender.add(url):
        return "apprise knows no service with this URL."
    text = apprise.NotifyFormat.TEXT
    result = sender.notify(said.body(), title=said.title, body_format=text, timeout=_COMMAND_S)
    if result:
        return None
    codes = re.findall(r"error=(\d{3})\b", " ".join(entry.message for entry in result.logs()))
    return f"it answered {codes[0]}." if codes else "apprise could not deliver the message."


def _post(url: str, message: object) -> str | None:
    if not is_url(url):  # urllib also opens files
        return "the value at this place is not a URL of http or https."
    is_text = isinstance(message, str)
    headers = {"Content-Type": "text/plain" if is_text else "application/json", "User-Agent": "paceline"}
    data = str(message) if is_text else json.dumps(message)
    try:
        request = urllib.request.Request(url, data=data.encode(), headers=headers, method="POST")
        with urllib.request.urlopen(request, timeout=_HOOK_S):
            return None
    except urllib.error.HTTPError as error:
        with error:
            return f"it answered {error.code}."
    except urllib.error.URLError as error:
        # Return only the error's reason, because the error's own text may contain the URL.
        return f"{error.reason}."
    except TimeoutError:
        return f"it did not answer within {_HOOK_S:g} s."
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"{type(error).__name__}."


def _mail(to: str, said: Notification) -> str | None:
    program = shutil.which("sendmail") or next((path for path in _SENDMAIL if os.access(path, os.X_OK)), None)
    if program is None:
        return f"there is no sendmail on {os.uname().nodename}."
    message = EmailMessage()
    message["To"] = to
    message["Subject"] = " ".join(said.title.split())[:200]
    message.set_content(said.text())
    # Options of sendmail: -t takes the recipient from the message, and -oi accepts a line that is a single dot.
    return _run([program, "-t", "-oi"], message.as_bytes(), None, said.folder)


def _command(words: list[str], said: Notification) -> str | None:
    variables = {**said.variables, "PACELINE_RUN_TEXT": said.text()}
    return _run(words, json.dumps(said.to_json()).encode(), variables, said.folder)


def _run(words: list[str], given: bytes, variables: Mapping[str, str] | None, folder: Path) -> str | None:
    environment = {**processes.shell_environment(), **(variables or {})}
    try:
        # Run the command in the run's folder, even if a process other than the supervisor starts the command.
        done = subprocess.run(
            words, input=given, env=environment, cwd=folder, capture_output=True, timeout=_COMMAND_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it did not end within {_COMMAND_S:g} s."
    except OSError as error:
        return f"{words[0]!r} can't be run: {error.strerror}."
    if done.returncode == 0:
        return None
    last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
    return f"it ended with {done.returncode}{f': {visible(last[0])}' if last else ''}."
