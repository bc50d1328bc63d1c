"""The description of a run for its pods, and the messages to and between them.

Connections to index 0 begin with proofs of the run's key (`paceline.system.handshake`), then a JSON request:

    {"what": "agent", "rank": 1, ...}    another pod offers to become an agent. "attempts": how often it was an agent;
                                         "preempted": how many of these attempts ended by a preemption of index 0.
                                         Answers: {"incarnation": start time of index 0}, later {"go": true}: the connection
                                         is now an agent's link; or the pod has to exit: {"over": true}: the run has ended,
                                         {"give_back": true}: pods are missing, {"preempted": true}: Kubernetes ends index 0
    {"what": "leaving", "rank": 1}       Kubernetes ends the pod of this rank
    {"what": "pull"}                     a reader then sends {"known": ...}, each answered by frames; the last has "over"
    {"what": "exec", "request": ...}     `paceline exec`, followed by lists of messages both ways
    {"what": "cancel", "request": ...}   write a cancel request. Answer: {}
    {"what": "put", "size": N}           the run's files that are too large for Secrets. Answer: {"have": bytes}
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from paceline.remote.wire import SILENCE_S
from paceline.targets.kubernetes.manifests import port_of

#: Environment variable with the path of the supervisor's `PodTicket` file. HUB_SOCKET: socket of pod 0's server.
TICKET_VARIABLE = "PACELINE_KUBERNETES_TICKET"
HUB_SOCKET = "/paceline/hub.sock"
#: Exit code of a pod that Kubernetes must start again. After exit code 0, Kubernetes would count the pod as done.
EXIT_AGAIN = 75
#: If a pod can't begin, its log has a line with this prefix and the reason, and the pod ends with this exit code.
COMPLAINT, EXIT_COMPLAINT = "paceline: ", 70

#: The most bytes of files that a pod writes to its log: a kubelet rotates logs at 10 MiB, and base64 adds a third.
LOG_BYTES = 6 << 20
#: A JSON object: a message on a connection, or the content of `engine.json`.
Noted: TypeAlias = "Mapping[str, Any]"
#: Name of the file in a pod that lists the canceled runs of a Job with many runs: {run id: cancel request}.
DROPPED = "dropped.json"
_MARK = "PACELINE-PART"
_LINE = 8000


@dataclass(frozen=True, kw_only=True)
class PodTicket:
    """The description of a run for its pods.

    Attributes:
        workspace: Path of the workspace in a pod, below the folder of workspaces, such as "lab/.paceline".
        key: Secret in hexadecimal by which the run's pods and the submitting machine authenticate to each other.
        library: Digest of the library, whose parts are files `library.N`.
        source_parts: Number of files `source.N`, which together are a tar.gz of the source.
        upload_bytes: Size of the packed run folder if the submitting machine uploads it; 0 if a Secret holds it as `archive`.
        volume: Name of the volume claim that the pods mount; "" without one.
        live: Whether the pod writes changes into its log during the run, for readers who may not forward ports.
        runs: The ids of a Job's runs by index, if the Job has many runs.
        archive: Name of the pod's file with the packed run folder.
    """

    run_id: str
    job: str
    port: int
    key: str
    library: str
    node_count: int
    workspace: str = ""
    gang_wait_s: float = 300.0
    silence_s: float = SILENCE_S
    upload_bytes: int = 0
    source_parts: int = 0
    volume: str = ""
    live: bool = False
    runs: Sequence[str] = ()
    archive: str = "run.0"

    def to_json(self) -> Noted:
        return asdict(self)

    @classmethod
    def read(cls, path: str | Path) -> PodTicket:
        """Return the ticket at `path`, adapted to this pod's run if the Job has several."""
        found = cls(**json.loads(Path(path).read_text(encoding="utf-8")))
        if not found.runs:
            return found
        index = pod_index()
        run_id = found.runs[index]
        return replace(found, run_id=run_id, port=port_of(run_id), archive=archive_name(index))


def pod_index() -> int:
    """Return the number of this pod in its Job."""
    return int(os.environ.get("JOB_COMPLETION_INDEX", "0"))


def archive_name(index: int) -> str:
    """Return the archive's file name of the run with this index."""
    return f"run.{index}"


def log_lines(number: int, packed: bytes) -> Iterator[str]:
    """Yield log lines that contain one compressed part of a run's changes."""
    text = base64.b64encode(packed).decode()
    for at in range(0, len(text), _LINE):
        yield f"{_MARK} {number} {text[at : at + _LINE]}"
    yield f"{_MARK} {number} ."


def parts_in(lines: Iterable[str]) -> Iterator[tuple[int, bytes]]:
    """Yield (part number, data) of each complete part that `log_lines` has written."""
    found: dict[str, list[str]] = {}
    for line in lines:
        words = line.split(" ")
        if len(words) != 3 or words[0] != _MARK:
            continue
        _, number, text = words
        if text != ".":
            found.setdefault(number, []).append(text)
        elif number.isdecimal():
            try:
                yield int(number), zlib.decompress(base64.b64decode("".join(found.pop(number, []))))
            except (ValueError, zlib.error):
                continue


def message(values: Mapping[str, object]) -> bytes:
    return json.dumps(values).encode()
