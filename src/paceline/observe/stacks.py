"""Get the stacks of a run's workers from its supervisor, by the messages that `paceline exec` also uses."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.errors import RunStateError
from paceline.observe import wait_graph
from paceline.observe.node.messages import ProcessFacts, Thread, WorkerFacts, WorkersReport
from paceline.runs import read, states
from paceline.runs.execute import Files
from paceline.runs.folder import RunFolder
from paceline.runs.remote_status import Channel, ExecRequest

#: Timeout of a request in seconds. Nodes answer within 20 s, but a login host or bucket that passes the answer on may be slow.
LIMIT_S = 60.0
_LOOK_S = 0.01
_RECORD_S = 2.0
#: Paceline's files whose functions wrap calls of torch to measure time.
BETWEEN = ("/paceline/system/step_clock.py", "/paceline/collectives/step_hooks.py")
#: Files of the outermost frames in the stack of each worker and thread. Their functions have called the script.
_BELOW = ("/paceline/worker/script.py", "/paceline/worker/__main__.py", "/threading.py")


@dataclass(frozen=True)
class RunStacks:
    """The stacks of a run's workers at one moment; `told` has them as JSON values."""

    told: WorkersReport

    @property
    def waiting(self) -> list[str]:
        """Sentences on which ranks wait for which, the cause first; empty if no rank waits."""
        return wait_graph.sentences(self.told)

    @property
    def places(self) -> list[str]:
        """Sentences that say which line of code each rank runs."""
        found: dict[str, list[int]] = {}
        for rank in self.ranks:
            found.setdefault(wait_graph.stands(rank, self.told), []).append(rank)
        return [
            f"{wait_graph.ranks_words(ranks).capitalize()}: {'each' if len(ranks) > 1 else 'it'} {text}."
            for text, ranks in sorted(found.items(), key=lambda item: len(item[1]))
        ]

    @property
    def notes(self) -> list[str]:
        """Permissions that nodes lack to read stacks, and how to grant them."""
        return list(self.told["notes"])

    @property
    def ranks(self) -> dict[int, WorkerFacts]:
        """Rank -> facts such as "pid", "state" and "threads" (docs/when-it-hangs.md)."""
        return {int(rank): found for rank, found in self.told["ranks"].items()}

    def to_json(self) -> dict[str, object]:
        return {**self.told, "waiting": self.waiting}

    def groups(self) -> Iterator[tuple[list[int], str, list[Thread]]]:
        """Return (ranks, process, threads) for each group of ranks with equal stacks.

        Groups of workers (`process` is "") come first, groups of child processes second. Small groups precede large.
        """
        found: dict[str, tuple[list[int], str, list[Thread]]] = {}
        for rank, one in sorted(self.ranks.items()):
            for process in (one, *one.get("children", ())):
                threads = process.get("threads") or []
                what = "" if process is one else _program(process, one)
                # Leave pids and addresses out of the key, which must be equal for ranks that run the same code.
                key = json.dumps([what, threads or process.get("silent", ""), process.get("state") in ("T", "t")])
                group = found.setdefault(key, ([], what, threads))
                if rank not in group[0]:
                    group[0].append(rank)
        return iter(sorted(found.values(), key=lambda group: (group[1] != "", len(group[0]))))

    def __str__(self) -> str:
        """Return the text of `paceline stacks`."""
        lines = [*self.waiting]
        for ranks, what, threads in self.groups():
            lines += ["", f"{wait_graph.ranks_words(ranks).capitalize()}{f', {what}' if what else ''}:"]
            if not threads:
                one = self.ranks[ranks[0]]
                lines.append(
                    f"  no stack: {one.get('silent', 'it was not asked') if not what else 'not a Python program of ours'}"
                )
            for thread in filter(None, map(_without_ours, threads)):
                lines.append(f"  thread {thread['name']}".rstrip())
                lines += [
                    f"    {wait_graph.short(frame['file'], self.told)}:{frame['line']} {frame['function']}"
                    for frame in thread["frames"]
                ]
        lines += ["", *(f"Note: {note}" for note in self.notes)] if self.notes else []
        return "\n".join(lines).strip("\n")


def _without_ours(thread: Thread) -> Thread | None:
    """Return a thread without frames of Paceline and imports, or None if it is Paceline's."""
    frames = [
        frame
        for frame in thread["frames"]
        if not frame["file"].startswith("<frozen importlib") and not frame["file"].endswith(BETWEEN)
    ]
    while len(frames) > 1 and frames[-1]["file"].endswith(_BELOW):
        del frames[-1]
    if frames and thread["name"] != "main" and "/paceline/collectives/" in frames[-1]["file"]:
        return None
    return {**thread, "frames": frames}


def _program(process: ProcessFacts, worker: WorkerFacts) -> str:
    if process["command"] == worker.get("command"):
        return "a process forked from it"
    return f"process {str(process['command'])[:80]}"


def take(folder: RunFolder, *, native: bool = False, limit_s: float = LIMIT_S) -> RunStacks:
    """Return the stacks of a live run.

    native: Return frames of C too. For this, py-spy stops each process for some milliseconds.

    Raises:
        RunStateError: The run is not alive, or its supervisor does not answer or is too old.
        TargetError: The run's supervisor cannot be reached.
    """
    return RunStacks(ask(folder, {"stacks": {"native": native}}, limit_s))


def ask(folder: RunFolder, request: ExecRequest, limit_s: float) -> WorkersReport:
    """Send the supervisor a request for stacks or a profile, and return its report."""
    record = read.record(folder)
    if record.status != states.RUNNING:
        raise RunStateError(f"run {record.run_id} is {record.status}: its workers have stacks while it is Running.")
    channel: Channel = read.channel(folder) or Files(folder)
    channel.begin({**request, "argv": [], "rank": 0, "terminal": None, "term": None})
    try:
        return _answer(channel, folder, limit_s)
    finally:
        channel.close()


def _answer(channel: Channel, folder: RunFolder, limit_s: float) -> WorkersReport:
    text, begun_s = b"", time.monotonic()
    looked_s = begun_s
    while True:
        for told in channel.receive():
            if "error" in told:
                raise RunStateError(f"run {folder.run_id}: the stacks of workers can't be sampled: {told['error']}.")
            if "out" in told:
                text += base64.b64decode(told["out"])
            if "exit" in told:
                found: WorkersReport = json.loads(text)
                return found
        now_s = time.monotonic()
        is_over = channel.is_over
        if now_s - looked_s > _RECORD_S:
            looked_s = now_s
            is_over = is_over or read.record(folder).is_terminal
        if is_over:
            raise RunStateError(f"run {folder.run_id} has ended meanwhile.")
        if now_s - begun_s > limit_s:
            raise RunStateError(
                f"run {folder.run_id}: its supervisor has not answered within {limit_s:g} s. `paceline status {folder.run_id}` "
                "says whether it is there."
            )
        time.sleep(_LOOK_S)
