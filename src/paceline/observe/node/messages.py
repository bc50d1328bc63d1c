"""Define the messages in which a node reports on its workers: stack dumps, profiles and load."""

from __future__ import annotations

from typing import TypedDict


class Frame(TypedDict):
    """A frame of a stack."""

    file: str
    line: int
    function: str


class Thread(TypedDict):
    """The stack of a thread, its innermost frame first. name: "main" for the main thread."""

    name: str
    current: bool
    frames: list[Frame]


class Collective(TypedDict):
    """An open collective; the fields are those of `paceline.system.collective_state.BoardEntry`."""

    channel: str
    kind: str
    name: str
    number: int
    shape: str
    bytes: int
    ranks: str
    began: float


class Recorded(TypedDict):
    """The state of torch's flight recorder. last: process group -> number of its last collective."""

    entries: list[Collective]
    last: dict[str, int]


class ProcessFacts(TypedDict, total=False):
    """Facts on a process: its state (`process_state.state_of`), and its stacks or why they are missing."""

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
    """Facts on a worker. If they are a profile, `rate`, `frames` and `stacks` replace the threads.

    frames: (function, file, line). stacks: (thread, indices of frames from the outermost, count).
    node, exit_code: the supervisor adds these two.
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
    """The output of `look` or `sampler` on one node."""

    time: float
    ranks: dict[str, WorkerFacts]
    notes: list[str]


class WorkersReport(NodeReport):
    """The supervisor's report on all workers of an attempt."""

    run_id: str
    attempt: int
    took_s: float
    work_dir: str


class WatchedWorkers(TypedDict):
    """The workers whose load a node measures. ranks: rank -> pid, 0 if unknown."""

    folder: str
    run_id: str
    ranks: dict[str, int]
