"""What squeue, sacct, scontrol and sinfo say, as data, in each shape that Slurm 20.11 to 26.05 give it.

Plain output is alike in all of them. JSON is not:

    20.11              none
    21.08, 22.05       "job_state": "RUNNING", times and counts are numbers, exit codes a wait status
    23.02              the same, but {"set", "infinite", "number"} here and there, exit codes {"status", "return_code"}
    23.11 and later    "job_state": ["RUNNING"], {"set", "infinite", "number"} for each number, "status" is a list
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: For `squeue -o`: what may hold any character comes last.
SQUEUE_FORMAT = "%i|%T|%r|%N|%j"
#: For `sacct -P -o`.
SACCT_FORMAT = "JobIDRaw,State,ExitCode,Reason,NodeList,JobName"
#: For `sinfo -N -o` (see `sinfo_words`): each node once for each of its partitions.
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
    """One job as the engine told of it.

    state: Slurm's own word, such as "RUNNING". reason: why it waits, or why it ended; "" where nothing is said.
    exit_code, signal: of the batch script; None where they are not known.
    by: who has canceled it: a user's name, or a uid as text.
    """

    job_id: str
    state: str
    reason: str = ""
    nodes: str = ""
    name: str = ""
    exit_code: int | None = None
    signal: int | None = None
    by: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> JobState:
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """One node as sinfo told of it. gpus, used_gpus: 0 where there are none."""

    name: str
    state: str
    cores: int
    used_cores: int
    gpus: int
    used_gpus: int
    reason: str = ""


def parse_squeue(text: str) -> list[JobState]:
    """The jobs of `squeue -h -o SQUEUE_FORMAT`, or of `squeue --json`."""
    if text.lstrip().startswith("{"):
        return [_of_queue_json(job) for job in _items(text, "jobs")]
    jobs = []
    for line in text.splitlines():
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
    """The jobs of `sacct -n -P -X -o SACCT_FORMAT`, or of `sacct --json`; of one that ran several times, the last."""
    if text.lstrip().startswith("{"):
        found = [_of_account_json(job) for job in _items(text, "jobs")]
    else:
        found = [_of_account_line(line) for line in text.splitlines() if line.count("|") >= 5]
    return list({job.job_id: job for job in found}.values())


def parse_job(text: str) -> JobState | None:
    """The job of `scontrol show job -o`; None where it shows none."""
    state = re.search(r"\bJobState=(\S+)", text)
    job_id = re.search(r"\bJobId=(\d+)", text)
    if state is None or job_id is None:
        return None

    def value(name: str) -> str:
        # The first of each name: a job's own comment comes after them all.
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
    """The nodes of `sinfo -h -N -O ...` (`SINFO_FIELDS`), or of `sinfo --json`, each once."""
    if text.lstrip().startswith("{"):
        return list({node.name: node for node in _nodes_of_json(text)}.values())
    nodes = {}
    for line in text.splitlines():
        fields, start = [], 0
        for _, width in SINFO_FIELDS:
            fields.append(line[start : start + width].strip())
            start += width
        name, state, cores, gres, used, reason = fields
        counts = cores.split("/")
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
    """For `sinfo -O`: `SINFO_FIELDS` with their widths."""
    return ",".join(f"{name}:{width}" for name, width in SINFO_FIELDS)


def gpu_count(gres: str) -> int:
    """GPUs in a list of generic resources: `gpu:a100:4(S:0-1),shard:8` has 4, `gpu:2(IDX:0-1)` has 2."""
    plain = re.sub(r"\([^)]*\)", "", gres)
    total = 0
    for item in plain.split(","):
        name, *rest = item.strip().split(":")
        if name == "gpu":
            total += int(rest[-1]) if rest and rest[-1].isdigit() else 1
    return total


def expand(nodes: str) -> list[str]:
    """The names in a list of Slurm's: `gpu[01-03,7],login` has gpu01, gpu02, gpu03, gpu7 and login."""
    names: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        names += _expand_one(item)
    return names


def counts(text: str) -> list[int]:
    """The numbers in a list of Slurm's, one for each node: `4(x2),2` is 4, 4, 2."""
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
            middle.append(str(number).zfill(len(first)))
    return [f"{before}{number}{rest}" for number in middle for rest in after]


# --- plain


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
    """The first word: `CANCELLED by 1000` is CANCELLED, `CANCELLED+` too."""
    words = text.replace("+", " ").split()
    return words[0].upper() if words else ""


def _said(text: str) -> str:
    return "" if text.strip() in ("None", "(null)", "N/A", "none", "None assigned", "Unknown") else text.strip()


# --- JSON


def _items(text: str, key: str) -> list[dict[str, Any]]:
    found = json.loads(text).get(key)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def _of_queue_json(job: Mapping[str, Any]) -> JobState:
    code, number = _exit_of(job.get("exit_code"))
    return JobState(
        job_id=str(_number(job.get("job_id")) or 0),
        state=_word(job.get("job_state")),
        # As squeue's own table has it: "launch failed requeued held", where the reason alone is "JobHeldUser".
        reason=_said(str(job.get("state_description") or job.get("state_reason") or "")),
        nodes=_said(str(job.get("nodes") or "")),
        name=str(job.get("name") or ""),
        exit_code=code,
        signal=number,
    )


def _of_account_json(job: Mapping[str, Any]) -> JobState:
    state = job.get("state") or {}
    code, number = _exit_of(job.get("exit_code"))
    word = _word(state.get("current"))
    if word == "FAILED" and code == 0 and not number:
        code = None  # 22.05 says so of every exit code
    by = job.get("kill_request_user")
    return JobState(
        job_id=str(_number(job.get("job_id")) or 0),
        state=word,
        reason=_said(str(state.get("reason") or "")),
        nodes=_said(str(job.get("nodes") or "")),
        name=str(job.get("name") or ""),
        exit_code=code,
        signal=number,
        by=str(by) if by and word == "CANCELLED" else None,
    )


def _nodes_of_json(text: str) -> Iterator[NodeState]:
    for node in _items(text, "nodes"):  # 21.08 and 22.05: one item a node
        yield NodeState(
            name=str(node.get("name")),
            state="+".join(
                [str(node.get("state", "")).lower(), *(str(flag).lower() for flag in node.get("state_flags") or ())]
            ),
            cores=_number(node.get("cpus")) or 0,
            used_cores=_number(node.get("alloc_cpus")) or 0,
            gpus=gpu_count(str(node.get("gres") or "")),
            used_gpus=gpu_count(str(node.get("gres_used") or "")),
            reason=str(node.get("reason") or ""),
        )
    for group in _items(text, "sinfo"):  # from 23.02: one item for nodes that are alike
        names = (group.get("nodes") or {}).get("nodes") or []
        states = (group.get("node") or {}).get("state") or []
        cpus, gres = group.get("cpus") or {}, group.get("gres") or {}
        reason = group.get("reason") or ""
        count = max(1, len(names))
        for name in names:
            yield NodeState(
                name=str(name),
                state="+".join(str(state).lower() for state in ([states] if isinstance(states, str) else states)),
                cores=(_number(cpus.get("total")) or 0) // count,
                used_cores=(_number(cpus.get("allocated")) or 0) // count,
                gpus=gpu_count(str(gres.get("total") or "")),
                used_gpus=gpu_count(str(gres.get("used") or "")),
                reason=str(reason.get("description") or "") if isinstance(reason, dict) else str(reason),
            )


def _word(value: Any) -> str:
    """The state itself, of several flags: 24.05 gives ["CANCELLED", "COMPLETING"], where the job is still ending."""
    words = [str(word).upper() for word in value] if isinstance(value, list) else [str(value or "").upper()]
    return "COMPLETING" if "COMPLETING" in words else (words[0] if words else "")


def _number(value: Any) -> int | None:
    if isinstance(value, dict):
        value = value.get("number") if value.get("set", True) and not value.get("infinite") else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return int(value) if isinstance(value, str) and value.isdigit() else None
    return int(value)


def _exit_of(value: Any) -> tuple[int | None, int | None]:
    if isinstance(value, dict):
        told = value.get("signal") or {}
        number = _number(told.get("id", told.get("signal_id"))) if isinstance(told, dict) else None
        return _number(value.get("return_code")), number
    status = _number(value)
    return (None, None) if status is None else (status >> 8, status & 0x7F)
