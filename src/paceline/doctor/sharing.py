"""Check which folders nodes share: the folder for runs, and this machine's workspace.

Runs work if all nodes share the folder, or if each node has its own folder. Runs fail if only some nodes share it.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from paceline.doctor.examination import FAIL, OK, WARN, Examination, Finding, NoAnswerError, Patient, skipped

_QUESTION_S = 20.0
#: Seconds after which to look for a missing file again: a network file system may show an old state of a folder.
_LOOK_AGAIN_S = 1.0


def check_sharing(examination: Examination) -> Iterator[Finding]:
    """Check which nodes share the folder for runs, and which the workspace."""
    if len(examination.well) > 1:
        yield from _check_folder(examination)
    yield from _check_workspace(examination)


def _check_folder(examination: Examination) -> Iterator[Finding]:
    first = examination.well[0]
    token = secrets.token_hex(8)
    path = f"{examination.folder}/.doctor-{token}"
    try:
        is_there = first.call(lambda: first.link.exists(examination.folder))
        # The token distinguishes this file from the file of another examination at the same time.
        first.call(lambda: first.link.put_file(path, token.encode()))
    except NoAnswerError as error:
        yield Finding(
            check="sharing",
            node=first.name,
            level=FAIL,
            seen=f"{examination.folder} can't be written: {error}",
            advice="Let it be written by this user, or set another folder on the target.",
        )
        return
    try:
        answers, failed = examination.ask_all("sharing", _sees(path, token), _QUESTION_S)
    finally:
        with suppress(NoAnswerError):
            first.call(lambda: first.link.remove(path if is_there else examination.folder))
    yield from failed
    if sum(answers.values()) == 1:
        own = f"{examination.folder} is each node's own: what a run needs is sent to it"
        yield Finding(check="sharing", level=OK, seen=own)
    else:
        yield _shared(examination.folder, answers)


def _check_workspace(examination: Examination) -> Iterator[Finding]:
    token = secrets.token_hex(8)
    path = Path(examination.workspace_dir) / f".doctor-{token}"
    try:
        path.write_text(token)
    except OSError as error:
        yield skipped("sharing", f"the workspace {examination.workspace_dir} can't be written: {error.strerror}")
        return
    try:
        answers, failed = examination.ask_all("sharing", _sees(str(path), token), _QUESTION_S)
    finally:
        with suppress(OSError):
            os.unlink(path)
    yield from failed
    if any(answers.values()):
        yield _shared(examination.workspace_dir, answers)
    elif answers:
        own = f"{examination.workspace_dir} is this machine's own: snapshots are sent, outputs come back"
        yield Finding(check="sharing", level=OK, seen=own)


def _sees(path: str, token: str) -> Callable[[Patient], bool]:
    def question(patient: Patient) -> bool:
        if patient.call(lambda: patient.link.sees(path, token)):
            return True
        time.sleep(_LOOK_AGAIN_S)
        return patient.call(lambda: patient.link.sees(path, token))

    return question


def _shared(folder: str, found: dict[str, bool]) -> Finding:
    without = [name for name in found if not found[name]]
    if not without:
        return Finding(check="sharing", level=OK, seen=f"{folder} is shared by all nodes")
    seen = [name for name in found if found[name]]
    return Finding(
        check="sharing",
        level=WARN,
        seen=f"{folder} is shared by {', '.join(seen[:4])}, but not by {', '.join(without[:4])}",
        advice="Mount it on all nodes, or choose a folder that is each node's own.",
    )
