"""Parse the output of squeue, sacct, scontrol and sinfo (Slurm 20.11 to 26.05)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: Format for `squeue -r -o`, with the job's name last. With -r, squeue lists the tasks of an array separately, as `123_4`.
SQUEUE_FORMAT = "%i|%T|%r|%N|%j"
#: Format for `squeue -o` of all users' jobs, with the job name last.
QUEUE_FORMAT = "%i|%T|%u|%C|%b|%D|%N|%r|%j"
#: Format for `sacct -P -o`.
SACCT_FORMAT = "JobID,State,ExitCode,Reason,NodeList,JobName"
#: Fields for `sinfo -N -O` and their widths (see `sinfo_words`). sinfo lists a node once for each of its partitions.
SINFO_FIELDS = (
    ("NodeList", 128),
    ("StateLong", 32),
    ("CPUsState", 32),
    ("Gres", 256),
    ("GresUsed", 256),
    ("Reason", 256),
)

_CANCELLED = re.compile(r"CANCELLED by (\S+)")


@dataclass(frozen=True, kw_only=True)
class JobState:
    """A job as Slurm reports it.

    Attributes:
        state: Slurm's name for the state, such as "RUNNING".
        reason: Slurm's reason why the job waits or ended; "" if unknown.
        exit_code, signal: How the batch script ended; None if unknown, as in squeue's answers.
        by: The user who canceled the job: a uid as text, or a name once `Query` has resolved it.
    """

    job_id: str
    state: str
    reason: str = ""
    nodes: str = ""
    name: str = ""
    exit_code: int | None = None
    signal: int | None = None
    by: str | None = None

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobState:
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """A node as sinfo reports it."""

    name: str
    state: str
    cores: int
    used_cores: int
    gpus: int
    used_gpus: int
    reason: str = ""


def parse_squeue(text: str) -> list[JobState]:
    """Parse the output of `squeue -h -o SQUEUE_FORMAT` into jobs."""
    jobs = []
    for line in text.splitlines():
        # The job's name comes last, because it may contain the separator.
        fields = line.split("|", 4)
        if len(fields) == 5:
            job_id, state, reason, nodes, name = fields
            jobs.append(
                JobState(
                    job_id=job_id.strip(),
                    state=_state(state),
                    reason=_said(reason),
                    nodes=_said(nodes),
                    name=name.strip(),
                )
            )
    return jobs


def parse_sacct(text: str) -> list[JobState]:
    """Parse `sacct -n -P -X -o SACCT_FORMAT` into each job's last state."""
    found = [_of_account_line(line) for line in text.splitlines() if line.count("|") >= 5]
    return list({job.job_id: job for job in found}.values())


def parse_job(text: str) -> JobState | None:
    """Parse `scontrol show job -o`. Return None without a job."""
    state = re.search(r"\bJobState=(\S+)", text)
    job_id = re.search(r"\bJobId=(\d+)", text)
    if state is None or job_id is None:
        return None

    def value(name: str) -> str:
        # Use the first match of each name: the job's comment at the end is free text, which may contain names.
        found = re.search(rf"\b{name}=(.*?)(?= [A-Z][\w/:]*=|$)", text, re.MULTILINE)
        return found[1].strip() if found else ""

    code, number = _exit_pair(value("ExitCode"))
    return JobState(
        job_id=job_id[1],
        state=_state(state[1]),
        reason=_said(value("Reason")),
        nodes=_said(value("NodeList")),
        name=value("JobName"),
        exit_code=code,
        signal=number,
    )


def parse_sinfo(text: str) -> list[NodeState]:
    """Parse `sinfo -h -N -O ...` (`SINFO_FIELDS`) into nodes, each once."""
    nodes = {}
    for line in text.splitlines():
        # Cut the line at fixed widths, because `sinfo -O` has no separator.
        fields, start = [], 0
        for _, width in SINFO_FIELDS:
            fields.append(line[start : start + width].strip())
            start += width
        name, state, cores, gres, used, reason = fields
        counts = cores.split("/")
        # CPUsState has the form allocated/idle/other/all. A node has one line per partition; its last line counts.
        if name and len(counts) == 4:
            nodes[name] = NodeState(
                name=name,
                state=state,
                cores=int(counts[3]),
                used_cores=int(counts[0]),
                gpus=gpu_count(gres),
                used_gpus=gpu_count(used),
                reason=_said(reason),
            )
    return list(nodes.values())


def sinfo_words() -> str:
    """Return the argument of `sinfo -O`: `SINFO_FIELDS` with widths."""
    return ",".join(f"{name}:{width}" for name, width in SINFO_FIELDS)


def gpu_count(gres: str) -> int:
    """Count GPUs in generic resources: `gpu:a100:4(S:0-1),shard:8` has 4, `gpu:2(IDX:0-1)` has 2."""
    # Drop texts in parentheses, which contain commas between sockets or indices.
    plain = re.sub(r"\([^)]*\)", "", gres)
    total = 0
    for item in plain.split(","):
        name, *rest = item.strip().split(":")
        if name == "gpu":
            total += int(rest[-1]) if rest and rest[-1].isdecimal() else 1
    return total


def expand(nodes: str) -> list[str]:
    """Expand Slurm's list of nodes: `gpu[01-03,7],login` is gpu01, gpu02, gpu03, gpu7 and login."""
    names: list[str] = []
    # Split at commas outside brackets, because a comma within brackets separates numbers of one item.
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        names += _expand_one(item)
    return names


def counts(text: str) -> list[int]:
    """Expand Slurm's list of numbers per node: `4(x2),2` is 4, 4, 2."""
    result: list[int] = []
    for item in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if found:
            result += [int(found[1])] * int(found[2] or 1)
    return result


def _expand_one(item: str) -> list[str]:
    found = re.search(r"\[([^\]]*)\]", item)
    if found is None:
        return [item]
    before, after = item[: found.start()], _expand_one(item[found.end() :])
    middle: list[str] = []
    for part in found[1].split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            # Pad with zeros, because Slurm writes them: n[08-10] means n08, n09, n10.
            middle.append(str(number).zfill(len(first)))
    return [f"{before}{number}{rest}" for number in middle for rest in after]


def _of_account_line(line: str) -> JobState:
    job_id, state, exit_code, reason, nodes, name = line.split("|", 5)
    by = _CANCELLED.match(state)
    code, number = _exit_pair(exit_code)
    return JobState(
        job_id=job_id,
        state=_state(state),
        reason=_said(reason),
        nodes=_said(nodes),
        name=name.rstrip("|"),
        exit_code=code,
        signal=number,
        by=by[1] if by else None,
    )


def _exit_pair(text: str) -> tuple[int | None, int | None]:
    found = re.fullmatch(r"(\d+):(\d+)", text.strip())
    return (int(found[1]), int(found[2])) if found else (None, None)


def _state(text: str) -> str:
    words = text.replace("+", " ").split()
    return words[0].upper() if words else ""


def _said(text: str) -> str:
    return "" if text.strip() in ("None", "(null)", "N/A", "none", "None assigned", "Unknown") else text.strip()
