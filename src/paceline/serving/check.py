"""Check a configuration before serving it: load it in a model process, and send it one sample.

The model process uses the service's own interpreter, as it does when the server starts it. The check opens no port, and
does not need starlette and uvicorn.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from paceline.errors import ServingError
from paceline.serving import wire
from paceline.serving.config import ServerConfig
from paceline.serving.front.models import lay_out, verify
from paceline.serving.front.process import StartedModel, ending
from paceline.serving.model.answers import message_of
from paceline.system.files import remove_tree
from paceline.system.scratch import Scratch


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """The result of checking a configuration.

    problem: The reason why the configuration can't be served, in one sentence; None if it can.
    log: Output of the model process.
    kind: Kind of the model, such as "script".
    load_s, answer_s: Seconds for loading the model, and for the response to the sample.
    status, answer: HTTP status and body of the response to the sample; None without a sample.
    """

    problem: str | None
    log: str
    kind: str = ""
    load_s: float = 0.0
    answer_s: float = 0.0
    status: int | None = None
    answer: str | None = None


def check(config: ServerConfig, sample: bytes | None = None) -> CheckResult:
    """Load a configuration's model in a model process, and score the sample."""
    with Scratch("check") as folder, open(folder / "log", "w+b") as output:
        try:
            verify(config)
            if config.entry_script is not None and not (Path(str(config.source_dir)) / config.entry_script).is_file():
                raise ServingError(f"entry_script={config.entry_script!r}: no such file in {config.source_dir!r}.")
            started = StartedModel(config, folder, lay_out(config, folder), output)
        except (ServingError, OSError) as error:
            return CheckResult(problem=str(error), log="")
        try:
            return _ask(started, config, sample, output)
        finally:
            started.end()
            remove_tree(folder / "azureml-models")


def _ask(started: StartedModel, config: ServerConfig, sample: bytes | None, output: IO[bytes]) -> CheckResult:
    began = time.monotonic()
    frame = _next(started, config.load_timeout_s, "loading")
    load_s = time.monotonic() - began
    if isinstance(frame, str):
        return CheckResult(problem=frame, log=_text(output))
    kind, payload = frame
    loaded = json.loads(payload)
    if kind == wire.FAILED:
        return CheckResult(problem=loaded["error"], log=_text(output), load_s=load_s)
    if sample is None:
        return CheckResult(problem=None, log=_text(output), kind=loaded["kind"], load_s=load_s)
    head = json.dumps(
        {"method": "POST", "path": "/score", "query": "", "headers": [("content-type", "application/json")]}
    ).encode()
    started.link.settimeout(config.timeout_s)
    began = time.monotonic()
    started.link.sendall(wire.frame(wire.CALLS, wire.pack_call(1, wire.SCORE, head, sample)))
    frame = _next(started, config.timeout_s, "answering the sample")
    done = {"kind": loaded["kind"], "load_s": load_s, "answer_s": time.monotonic() - began}
    if isinstance(frame, str):
        return CheckResult(problem=frame, log=_text(output), **done)
    ((_, reply),) = wire.unpack_replies(frame[1])
    text = reply.body.decode("utf-8", errors="replace")
    problem = None
    if reply.status >= 400:
        problem = f"the sample was answered {reply.status}: {message_of(reply.body)}"
        if reply.status >= 500 and (last := _exception(_text(output))):
            problem = f"the sample was answered {reply.status}, for the script failed: {last}"
    return CheckResult(problem=problem, log=_text(output), status=reply.status, answer=text, **done)


def _next(started: StartedModel, limit_s: float, doing: str) -> tuple[int, bytes] | str:
    """Return the model process's next message as (kind, payload), or why `doing` failed."""
    started.link.settimeout(limit_s)
    try:
        frame = wire.receive(started.link)
    except TimeoutError:
        return f"while {doing} it took more than {limit_s:g} s."
    return frame or f"while {doing}, {ending(started.process.wait())}."


def _text(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode("utf-8", errors="replace")


def _exception(log: str) -> str:
    _, mark, rest = log.rpartition("Traceback (most recent call last):\n")
    lines = [line for line in rest.splitlines() if line and not line.startswith(" ")]
    return lines[0] if mark and lines else ""
