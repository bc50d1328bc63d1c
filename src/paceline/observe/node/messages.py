"""Define the messages in which a node reports on its workers."""

from __future__ import annotations

from typing import TypedDict


class Frame(TypedDict):
    """A function call in a stack."""

    file: str
    line: int
    function: str


class Thread(TypedDict):
    """The stack of a thread, its innermost frame first. The main thread's name is "main"."""

    name: str
    current: bool
    frames: list[Frame]


class Collective(TypedDict):
    """A collective that has not completed, with the fields of `paceline.system.collective_state.BoardEntry`."""

    channel: str
    kind: str
    name: str
    number: int
    shape: str
    bytes: int
    ranks: str
    began: float


class Recorded(TypedDict):
    """The open collectives in torch's flight recorder.

    last: Process group -> number of the newest collective that this rank has started in this group.
    """

    entries: list[Collective]
    last: dict[str, int]


class ProcessFacts(TypedDict, total=False):
    """A process's state, and its stacks or the reason why they are missing."""

    pid: int
    parent: int
    state: str
    wchan: str
    cpu_s: float
    io_bytes: int
    tracer: int
    command: str
    threads: list[Thread]
    by: str
    silent: str
    answer_bytes: int
    call: str
    readers: list[int]


class WorkerFacts(ProcessFacts, total=False):
    """Facts about a worker. In a profile, `rate`, `frames` and `stacks` replace the threads.

    frames: (function, file, line) of each frame in the profile.
    stacks: (thread's name, indices into `frames` from the outermost frame, number of samples).
    node, exit_code: Facts that the supervisor adds.
    """

    gone: bool
    children: list[ProcessFacts]
    board: list[Collective]
    torch: Recorded
    rate: float
    frames: list[tuple[str, str, int]]
    stacks: list[tuple[str, list[int], int]]
    node: str
    exit_code: int


class NodeReport(TypedDict):
    """The output of the program `look` or `sampler` on one node."""

    time: float
    ranks: dict[str, WorkerFacts]
    notes: list[str]


class WorkersReport(NodeReport):
    """A stack dump or a profile of all workers of an attempt."""

    run_id: str
    attempt: int
    took_s: float
    work_dir: str


class WatchedWorkers(TypedDict):
    """The workers whose resource use a node measures; pid 0 means unknown."""

    folder: str
    run_id: str
    ranks: dict[str, int]
