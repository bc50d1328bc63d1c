"""The description of a run for its pods, and the messages between them and the submitting machine.

Connections to index 0 begin with proofs of the run's key (`paceline.system.handshake`), then a JSON request:

    {"what": "agent", "rank": 1, ...}    of another pod, with "attempts": how often it was an agent, and "preempted": how often
                                         a preemption of index 0 ended that. Answers: {"incarnation": N}, later {"go": true},
                                         after which the connection is that of an agent, or {"over": true}, {"give_back": true},
                                         or {"preempted": true}: Kubernetes takes index 0 away
    {"what": "leaving", "rank": 1}       Kubernetes ends the pod of this rank
    {"what": "pull"}                     of a reader. Then for each {"known": ...}: frames of changes, the last has "over"
    {"what": "exec", "request": ...}     of `paceline exec`. Then lists of messages both ways
    {"what": "cancel", "request": ...}   write the request to cancel. Answer: {}
    {"what": "put", "size": N}           a run's files that are too large for Secrets. Answer: {"have": bytes}
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

#: Variable of the supervisor with the path of its ticket, and path of the socket to the pod's first process.
TICKET_VARIABLE = "PACELINE_KUBERNETES_TICKET"
HUB_SOCKET = "/paceline/hub.sock"
#: Exit code of a pod that Kubernetes shall replace; with 0 it would count as done.
EXIT_AGAIN = 75
#: Prefix of a line that says why a pod could not begin, and its exit code.
COMPLAINT, EXIT_COMPLAINT = "paceline: ", 70

#: The most bytes of files that a pod writes to its log: kubelets rotate logs at 10 MiB, and base64 adds a third.
LOG_BYTES = 6 << 20
#: JSON of a connection's message, or of the notes in `engine.json`.
Noted: TypeAlias = "Mapping[str, Any]"
_MARK = "PACELINE-PART"
_LINE = 8000


@dataclass(frozen=True, kw_only=True)
class PodTicket:
    """The description of a run for its pods.

    Attributes:
        workspace: Name of the workspace's folder, with the folder above if that has the name.
        key: Secret of the run, in hexadecimal, which pods and the submitting machine prove to each other.
        library: Digest of the library, whose parts are files `library.N`.
        source_parts: Number of files `source.N`, the parts of a tar.gz with the source.
        upload_bytes: Size of the archive with the run's folder that a reader uploads; 0 if the file `run` is this archive.
        live: Whether changes go to the pod's log while the run lasts, for readers without the right to forward ports.
    """

    run_id: str
    job: str
    port: int
    workspace: str
    key: str
    library: str
    node_count: int
    gang_wait_s: float
    silence_s: float
    upload_bytes: int = 0
    source_parts: int = 0
    live: bool = False

    def to_json(self) -> Noted:
        return asdict(self)

    @classmethod
    def read(cls, path: str | Path) -> PodTicket:
        return cls(**json.loads(Path(path).read_text(encoding="utf-8")))


def log_lines(number: int, packed: bytes) -> Iterator[str]:
    """Yield the lines of a pod's log for a part, packed by zlib."""
    text = base64.b64encode(packed).decode()
    for at in range(0, len(text), _LINE):
        yield f"{_MARK} {number} {text[at : at + _LINE]}"
    yield f"{_MARK} {number} ."


def parts_in(lines: Iterable[str]) -> Iterator[tuple[int, bytes]]:
    """Yield (number, data) of each complete part in a pod's log."""
    found: dict[str, list[str]] = {}
    for line in lines:
        words = line.split(" ")
        if len(words) != 3 or words[0] != _MARK:
            continue
        _, number, text = words
        if text != ".":
            found.setdefault(number, []).append(text)
        elif number.isdigit():
            try:
                yield int(number), zlib.decompress(base64.b64decode("".join(found.pop(number, []))))
            except (ValueError, zlib.error):
                continue


def message(values: Mapping[str, object]) -> bytes:
    return json.dumps(values).encode()
