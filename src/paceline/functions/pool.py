"""Make many calls in one worker: each in a forked process, several at the same time.

A forked process needs no new interpreter and no imports. Crashes and changes of global variables stay in the process.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn, TypedDict

from paceline.functions import calls
from paceline.job.job import RANK_VARIABLES
from paceline.runs.failure import signal_name, signal_words
from paceline.system.files import append_line, json_lines
from paceline.system.processes import core_count
from paceline.worker.script import without_ours

#: Seconds between two lines of progress in the log.
_TELL_S = 10.0
#: Exit codes of a call's process: the result is written, or the call's error is written. With another code, it ended early.
_RETURNED, _NOTED = 116, 117


class CallError(TypedDict):
    """The exception of a call, such as "ValueError: bad lr", with its traceback."""

    exception: str
    traceback: str


class ResultLine(TypedDict, total=False):
    """The result of one call: a value, a file's name, or an error."""

    call: int
    value: object
    file: str
    error: CallError


def read_lines(folder: Path) -> dict[int, ResultLine]:
    """Return {call number: result} of all calls that have ended. A result of any attempt replaces errors."""
    found: dict[int, ResultLine] = {}
    # Read the files of later attempts last, because their errors are newer: these files have higher numbers.
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: (len(path.name), path.name)):
        for line in json_lines(path):
            # Check each line: other users can write to a shared folder.
            is_valid = (
                isinstance(line, dict) and type(line.get("call")) is int and {"value", "file", "error"} & set(line)
            )
            if is_valid and ("error" not in line or "error" in found.get(line["call"], line)):
                found[line["call"]] = line
    return found


def call_all(
    function: Callable[..., object],
    given: Sequence[Mapping[str, object]],
    folder: Path,
    *,
    at_once: int,
    pickled: bool,
    limit: int,
) -> None:
    """Make the calls in `given` that have no result yet, in parallel processes.

    Write results of at most `limit` bytes into `folder`, as pickles if `pickled`. at_once: Number of processes; 0: one per core.

    Raises:
        RuntimeError: Some calls have failed. All other calls have been made.
    """
    folder.mkdir(exist_ok=True)
    gpus = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    # Skip calls that an earlier attempt of the run has completed.
    done = {number for number, line in read_lines(folder).items() if "error" not in line}
    pending = [number for number in range(len(given)) if number not in done][::-1]
    free = list(range(min(at_once or core_count(), max(1, len(pending)))))[::-1]
    first = 1 + max((int(path.stem) for path in folder.glob("*.jsonl") if path.stem.isdecimal()), default=-1)
    files = [folder / f"{first + slot}.jsonl" for slot in sorted(free)]
    live: dict[int, tuple[int, int]] = {}
    failed: list[int] = []
    ended, told = len(done), time.monotonic()
    # Flush now: forked children inherit unwritten output, and would write it again.
    sys.stdout.flush()
    sys.stderr.flush()
    while pending or live:
        while pending and free:
            number, slot = pending.pop(), free.pop()
            if (pid := os.fork()) == 0:
                gpu = gpus[slot % len(gpus)] if gpus else None
                make_line = partial(_line, function, number, given[number], folder, pickled=pickled, limit=limit)
                _child(make_line, number, files[slot], gpu)
            live[pid] = number, slot
        pid, status = os.waitpid(-1, 0)
        if pid not in live:
            continue  # skip a child process that the user's module has started
        number, slot = live.pop(pid)
        free.append(slot)
        ended += 1
        if (code := os.waitstatus_to_exitcode(status)) != _RETURNED:
            failed.append(number)
            if code != _NOTED:
                _note_death(files[slot], number, code)
        if time.monotonic() - told > _TELL_S:
            told = time.monotonic()
            print(f"{ended:,} of {len(given):,} calls have ended, {len(failed):,} of them failed.", flush=True)
    lines = read_lines(folder)
    # A call whose process was killed after it had written its result has not failed.
    if failed := [number for number in sorted(failed) if "error" in lines[number]]:
        error = lines[failed[0]]["error"]["exception"]
        raise RuntimeError(f"{len(failed):,} of {len(given):,} calls failed. Call {failed[0]}: {error}")


def _child(make_line: Callable[[], ResultLine], number: int, file: Path, gpu: str | None) -> NoReturn:
    code = 1
    try:
        if gpu is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        # Remove these variables, because calls are independent: no call may try to join a process group.
        for name in (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        append_line(file, make_line())
        code = _RETURNED
    except BaseException as error:
        error.__traceback__ = without_ours(error.__traceback__)
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        line = "".join(traceback.format_exception_only(type(error), error)).strip()
        print(f"Call {number} failed:\n{text}", file=sys.stderr, end="")
        append_line(file, {"call": number, "error": {"exception": line, "traceback": text}})
        code = _NOTED
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Skip exit handlers (atexit), because the parent process has registered them for itself.
        os._exit(code)


def _line(
    function: Callable[..., object],
    number: int,
    given: Mapping[str, object],
    folder: Path,
    *,
    pickled: bool,
    limit: int,
) -> ResultLine:
    value = calls.make(function, given["args"], given["kwargs"])  # type: ignore[arg-type]
    # Write a small value into the line, not into a file: thousands of files would be slow to copy from other machines.
    if not pickled and calls.is_json(value) and len(repr(value)) <= min(limit, calls.LONGEST_WORDS):
        return {"call": number, "value": value}
    name = f"the result of {function.__name__}()"
    file = calls.store(folder, str(number), name, value, pickled=pickled, limit=limit)
    return {"call": number, "file": file}


def _note_death(file: Path, number: int, code: int) -> None:
    how = f"was ended by {signal_name(-code)}: {signal_words(-code)}" if code < 0 else f"ended with exit code {code}"
    line = f"the process of call {number} {how}"
    print(line, file=sys.stderr, flush=True)
    append_line(file, {"call": number, "error": {"exception": line, "traceback": ""}})
