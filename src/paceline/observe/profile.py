"""Profile a run's workers: a program on each node samples their stacks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UserError
from paceline.observe import wait_graph
from paceline.observe.node.messages import WorkerFacts, WorkersReport
from paceline.observe.stacks import BETWEEN, LIMIT_S, ask
from paceline.runs.folder import RunFolder

#: A profile's duration in seconds, and its samples per second: the defaults, and below them the maxima.
SECONDS, RATE = 30.0, 100.0
MOST_SECONDS, MOST_RATE = 600.0, 500.0
#: Maximum number of functions that the text of a profile lists.
SHOWN = 10
#: If a function's shares of time differ by at least this much between ranks, the text shows which ranks have which share.
_APART = 0.1
#: Paceline's files that call the script, so that their frames are in every worker's stack.
_OURS = ("/paceline/worker/script.py", "/paceline/worker/__main__.py")
_SCHEMA = "https://www.speedscope.app/file-format-schema.json"


@dataclass(frozen=True)
class FunctionTime:
    """A function's share of the main threads' time, from 0 to 1.

    own: The share of the function's own lines, without the functions that it calls.
    whole: The share of the function and of all functions that it calls.
    by_rank: Rank -> the share `own` on this rank.
    """

    function: str
    file: str
    line: int
    own: float
    whole: float
    by_rank: Mapping[int, float]


@dataclass(frozen=True)
class RunProfile:
    """The stacks sampled from a run's workers; `told` has them as JSON values."""

    told: WorkersReport

    @property
    def notes(self) -> list[str]:
        """Permissions that nodes lack to sample stacks, and how to grant them."""
        return list(self.told["notes"])

    @property
    def ranks(self) -> dict[int, WorkerFacts]:
        """Rank -> its profile with "by", "rate", "frames" and "stacks", or "silent" (a reason)."""
        return {int(rank): found for rank, found in self.told["ranks"].items()}

    def functions(self, *, below: bool = False, limit: int = SHOWN) -> list[FunctionTime]:
        """Return the functions in which main threads spent most time, the longest first.

        below: Measure the workers' child processes, such as those of a DataLoader, instead of the workers.
        """
        shares = {rank: _shares(one, below=below) for rank, one in self.ranks.items() if "stacks" in one}
        shares = {rank: both for rank, both in shares.items() if both[0]}
        if not shares:
            return []
        own, whole, lines = Counter[tuple[str, str]](), Counter[tuple[str, str]](), {}
        for mine, all_of, where in shares.values():
            own.update(mine)
            whole.update(all_of)
            lines.update(where)
        return [
            FunctionTime(
                function=key[1],
                file=wait_graph.short(key[0], self.told),
                line=lines[key],
                own=count / len(shares),
                whole=whole[key] / len(shares),
                by_rank={rank: mine.get(key, 0.0) for rank, (mine, _, _) in sorted(shares.items())},
            )
            for key, count in own.most_common(limit)
        ]

    def place(self, rank: int) -> tuple[str, float] | None:
        """Return the rank's most frequent line of code, and its share of the time.

        The line is a text such as "data.py:41, `load`". If the rank waits for its DataLoader over a third of the time,
        return a line of the DataLoader's process. Return None without samples.
        """
        found = self.ranks.get(rank, {})
        places, below = Counter[tuple[str, str, int]](), Counter[tuple[str, str, int]]()
        for where, frames, count in _stacks(found):
            if where == "main":
                places[_place(frames, self.told)] += count
            elif where.startswith("process ") and where.endswith(" main"):
                below[_place(frames, self.told)] += count
        if not places:
            return None
        (file, function), count = _most(places)
        waiting = _loader_share(found)
        if below and waiting > 1 / 3:
            (file, function), in_child = _most(below)
            share = in_child / sum(below.values()) * waiting
            line = _line(below, file, function)
            return f"{wait_graph.short(file, self.told)}:{line}, `{function}` (of its data loader)", share
        return (
            f"{wait_graph.short(file, self.told)}:{_line(places, file, function)}, `{function}`",
            count / sum(places.values()),
        )

    def save(self, path: str | Path) -> Path:
        """Write all samples as a file for https://www.speedscope.app, and return its path.

        The file has one profile for each thread of each rank.
        """
        target = Path(path)
        target.write_text(json.dumps(self.speedscope()), encoding="utf-8")
        return target

    def speedscope(self) -> dict[str, object]:
        """Return the samples in speedscope's format.

        https://github.com/jlfwong/speedscope/wiki/Importing-from-custom-sources
        """
        frames: dict[tuple[str, str, int], int] = {}
        profiles = []
        for rank, one in sorted(self.ranks.items()):
            threads: dict[str, tuple[list[list[int]], list[float]]] = {}
            for where, stack, count in _stacks(one):
                samples, weights = threads.setdefault(where, ([], []))
                samples.append([frames.setdefault(frame, len(frames)) for frame in stack])
                weights.append(count / float(one["rate"] or 1))
            for where, (samples, weights) in sorted(threads.items(), key=lambda item: (item[0] != "main", item[0])):
                profiles.append(
                    {
                        "type": "sampled",
                        "name": f"rank {rank}, {where}",
                        "unit": "seconds",
                        "startValue": 0,
                        "endValue": sum(weights),
                        "samples": samples,
                        "weights": weights,
                    }
                )
        shown = [{"name": f, "file": wait_graph.short(file, self.told), "line": line} for f, file, line in frames]
        return {
            "$schema": _SCHEMA,
            "exporter": "paceline",
            "name": str(self.told["run_id"]),
            "activeProfileIndex": 0,
            "shared": {"frames": shown},
            "profiles": profiles,
        }

    def to_json(self) -> dict[str, object]:
        """Return plain JSON values."""
        return {**self.told, "functions": [vars(one) for one in self.functions()]}

    def __str__(self) -> str:
        """Return the text of `paceline profile`."""
        lines = _table(self.functions())
        if more := self.functions(below=True, limit=SHOWN // 2):
            lines += ["", "In the processes below the workers, such as a DataLoader's:", *_table(more)]
        silent = {rank: one["silent"] for rank, one in sorted(self.ranks.items()) if "silent" in one}
        lines += [f"Rank {rank} could not be sampled: {why}." for rank, why in silent.items()]
        return "\n".join([*lines, *(f"Note: {note}" for note in self.notes)])


def take(folder: RunFolder, *, seconds: float = SECONDS, rate: float = RATE) -> RunProfile:
    """Sample the workers of a live run.

    Raises:
        UserError: `seconds` or `rate` is out of bounds.
        RunStateError: The run is not alive, or its supervisor does not answer or is too old.
        TargetError: The run's supervisor cannot be reached.
    """
    if not 1 <= seconds <= MOST_SECONDS:
        raise UserError(f"seconds={seconds:g}: give a number from 1 to {MOST_SECONDS:g}.")
    if not 1 <= rate <= MOST_RATE:
        raise UserError(f"rate={rate:g}: give a number of samples a second from 1 to {MOST_RATE:g}.")
    return RunProfile(ask(folder, {"profile": {"seconds": seconds, "rate": rate}}, seconds + 2 * LIMIT_S))


def _stacks(one: WorkerFacts) -> Iterator[tuple[str, list[tuple[str, str, int]], int]]:
    """Yield (thread, frames from the outermost, count) without frames of Paceline."""
    frames = [(str(function), str(file), int(line)) for function, file, line in one.get("frames", ())]
    for where, numbers, count in one.get("stacks", ()):
        stack = [frames[number] for number in numbers if not frames[number][1].endswith(BETWEEN)] or [
            frames[numbers[0]]
        ]
        while len(stack) > 1 and stack[0][1].endswith(_OURS):
            del stack[0]
        yield str(where), stack, int(count)


_Shares = tuple[dict[tuple[str, str], float], dict[tuple[str, str], float], dict[tuple[str, str], int]]


def _shares(one: WorkerFacts, *, below: bool) -> _Shares:
    """Return functions' shares of time, alone and with callees, and their busiest lines.

    below: Count the workers' child processes instead of the main threads.
    """
    own, whole, lines = Counter[tuple[str, str]](), Counter[tuple[str, str]](), Counter[tuple[tuple[str, str], int]]()
    total = 0
    for where, stack, count in _stacks(one):
        if not where.endswith(" main") if below else where != "main":
            continue
        total += count
        inner = stack[-1]
        own[inner[1], inner[0]] += count
        lines[(inner[1], inner[0]), inner[2]] += count
        for key in {(file, function) for function, file, _ in stack}:
            whole[key] += count
    most = {key: line for (key, line), _ in reversed(lines.most_common())}
    return _parts(own, total), _parts(whole, total), most


def _parts(counts: Mapping[tuple[str, str], int], total: int) -> dict[tuple[str, str], float]:
    return {key: count / total for key, count in counts.items()}


def _place(frames: list[tuple[str, str, int]], told: WorkersReport) -> tuple[str, str, int]:
    """Return (file, function, line) of the innermost frame of the script, else of any code."""
    own = next((frame for frame in reversed(frames) if wait_graph.is_own(frame[1], told)), frames[-1])
    return own[1], own[0], own[2]


def _most(places: Mapping[tuple[str, str, int], int]) -> tuple[tuple[str, str], int]:
    found = Counter[tuple[str, str]]()
    for (file, function, _), count in places.items():
        found[file, function] += count
    return found.most_common(1)[0]


def _line(places: Mapping[tuple[str, str, int], int], file: str, function: str) -> int:
    return max((count, line) for (f, g, line), count in places.items() if (f, g) == (file, function))[1]


def _loader_share(one: WorkerFacts) -> float:
    counts = Counter[bool]()
    for where, stack, count in _stacks(one):
        if where == "main":
            counts[any(function.endswith("_try_get_data") for function, _, _ in stack)] += count
    return counts[True] / max(1, sum(counts.values()))


def _table(found: Iterable[FunctionTime]) -> list[str]:
    rows = []
    for one in found:
        text = f"{100 * one.own:5.1f} %  {100 * one.whole:5.1f} %  {one.function}  {one.file}:{one.line}"
        rows.append(text + _differing(one.by_rank))
    return ["   own    whole  function", *rows] if rows else ["No main thread could be sampled."]


def _differing(by_rank: Mapping[int, float]) -> str:
    if len(by_rank) < 2 or max(by_rank.values()) - min(by_rank.values()) < _APART:
        return ""
    groups: dict[int, list[int]] = {}
    for rank, share in by_rank.items():
        groups.setdefault(round(100 * share / 5) * 5, []).append(rank)
    parts = []
    for _, ranks in sorted(groups.items(), reverse=True)[:4]:
        mean = sum(by_rank[rank] for rank in ranks) / len(ranks)
        parts.append(f"{wait_graph.ranks_words(ranks)} {100 * mean:.0f} %")
    return f"   ({', '.join(parts)})"
