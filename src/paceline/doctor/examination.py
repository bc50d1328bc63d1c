"""The state that the checks of `paceline compute doctor` share, and requests to the nodes.

A node that has not answered in time gets no further request, which would only wait behind the first request.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, TypeVar

from paceline.errors import PacelineError
from paceline.remote import foreign_python
from paceline.targets.polling import all_within

if TYPE_CHECKING:
    from paceline.remote.link.link import CommandEnd, Link


#: Time limit in seconds for a node's report on itself: importing torch from a cold network folder may take long.
FACTS_S = 90.0

OK, WARN, FAIL, SKIPPED = "ok", "warn", "fail", "skipped"

#: Seconds that are added to a request's time limit, for the transfer of the request and of the answer.
_SLACK_S = 5.0

Result = TypeVar("Result")

#: Name prefixes of interfaces to skip: bridges of containers and VMs have one address on all hosts, and reach no other host.
_OF_NO_USE = ("docker", "podman", "cni", "virbr", "veth", "br-", "lxc", "lxdbr", "tailscale-")

#: Name of an interface -> (IPv4 address, prefix length)
Interfaces = Mapping[str, tuple[str, int]]


class PythonFacts(TypedDict, total=False):
    """The scripts' interpreter on a node, or the reason why it does not run."""

    path: str
    version: str
    error: str


class PackageFacts(TypedDict, total=False):
    """The version of a package or of Open MPI, or an error."""

    version: str
    detail: str
    path: str
    gpus: int
    missing: bool
    error: str


class SpaceFacts(TypedDict, total=False):
    """The free and total bytes of a folder's file system, or an error."""

    free: int
    total: int
    error: str


class GpuFacts(TypedDict, total=False):
    """The GPUs that nvidia-smi lists: name, driver and MiB of each."""

    devices: list[list[str]]
    has_tool: bool
    error: str


class StackFacts(TypedDict):
    """The settings that allow or forbid py-spy on a node, and py-spy's error message."""

    ptrace_scope: str
    may_trace: bool
    py_spy: str | None
    refused: str


class Facts(TypedDict, total=False):
    """A node's properties, as `on_node.facts` reports them.

    `modules` and `open_mpi` are missing if the interpreter does not work.
    """

    host: str
    agent_python: str
    python: PythonFacts
    space: dict[str, SpaceFacts]
    limits: dict[str, int | None]
    gpus: GpuFacts
    stacks: StackFacts
    modules: dict[str, PackageFacts]
    open_mpi: PackageFacts


@dataclass
class Examination:
    """The state of one call of `paceline compute doctor`, shared by its checks.

    Attributes:
        python: Interpreter of the scripts. None: the interpreter that runs Paceline on each node.
        folder: Folder on the nodes for runs and snapshots.
        interface: Network interface to use.
        workspace_dir: Folder of the workspace on this machine.
        facts: Name of a node -> the facts that the node has reported.
        places: Node -> its address in the network that all nodes share; None until `check_network` has found it.
    """

    patients: Sequence[Patient]
    folder: str
    workspace_dir: str
    python: str | None = None
    interface: str | None = None
    facts: dict[str, Facts] = field(default_factory=dict)
    places: dict[str, NetworkPlace] | None = None

    @property
    def well(self) -> list[Patient]:
        """The nodes that still answer requests."""
        return [patient for patient in self.patients if patient.gone is None]

    def python_of(self, patient: Patient) -> str:
        return self.python or patient.python

    def ask_all(
        self, check: str, question: Callable[[Patient], Result], timeout_s: float
    ) -> tuple[dict[str, Result], list[Finding]]:
        """Call `question` for all answering nodes. Return {node: answer}, and a finding of `check` per error."""
        results: dict[str, Result] = {}
        failed = []
        # If a node does not answer, mark it as `gone`, so that later checks do not wait for it.
        for name, answer in everywhere(self.well, question, timeout_s).items():
            if isinstance(answer, NoAnswerError):
                failed.append(
                    Finding(
                        check=check,
                        node=name,
                        level=FAIL,
                        seen=str(answer),
                        advice=f"Try it by hand on {name}: what holds it up would hold up a run.",
                    )
                )
            else:
                results[name] = answer
        return results, failed


def skipped(check: str, why: str) -> Finding:
    return Finding(check=check, level=SKIPPED, seen=why)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result of a check of one node, or of all nodes.

    Attributes:
        level: "ok", "warn" (runs may work), "fail" (runs will not work), or "skipped" (not checked).
        node: Name of the node; None for the target or for all nodes.
        seen: The result of the check in words and values.
        advice: What the user should do, or "".
    """

    check: str
    level: str
    seen: str
    node: str | None = None
    advice: str = ""

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def worst(findings: Iterable[Finding]) -> str:
    """Return the worst level of all findings: "fail", "warn" or "ok"."""
    levels = {finding.level for finding in findings}
    return next((level for level in (FAIL, WARN) if level in levels), OK)


def size_text(size: float) -> str:
    """Return a size in bytes as text, such as "1.5 GB"."""
    units = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6))
    return next((f"{size / scale:.1f} {unit}" for unit, scale in units if size >= scale), f"{size / 1e3:.0f} kB")


class NoAnswerError(Exception):
    """An error because a node gave no usable answer, with the reason."""


@dataclass
class Patient:
    """A node under examination. gone: why it no longer answers, or None."""

    link: Link
    gone: str | None = None

    @property
    def name(self) -> str:
        return self.link.name

    @property
    def python(self) -> str:
        """The path of the interpreter that runs Paceline on the node."""
        return str(self.link.hello.python[0])

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float = 60.0) -> CommandEnd:
        """Run a command on the node, and return the command's output."""
        return self.call(lambda: self.link.run(argv, input=input, timeout_s=timeout_s), timeout_s)

    def call(self, request: Callable[[], Result], timeout_s: float = 60.0) -> Result:
        """Make a request to the node, and return its result. Raise NoAnswerError on failure."""
        if self.gone:
            raise NoAnswerError(self.gone.removeprefix(f"{self.name}: "))
        try:
            return request()
        # An OSError is the node's own response, such as "no such file". If the link works, any other error is a timeout.
        except (OSError, PacelineError) as error:
            self.gone = self.link.lost
            if self.gone or not isinstance(error, PacelineError):
                raise NoAnswerError((self.gone or str(error)).removeprefix(f"{self.name}: ")) from error
            raise NoAnswerError(f"no answer in {timeout_s:g} s") from error

    def ask(
        self,
        program: str,
        mode: str,
        asked: Mapping[str, object],
        *,
        python: str | None = None,
        timeout_s: float = 60.0,
    ) -> dict[str, object]:
        """Run a program of the doctor on the node, and return its answer.

        program: "on_node" or "reduce_on_node".
        mode, asked: Name of the function to call in the program, and the function's argument.
        python: The interpreter for the program. None: the interpreter that runs Paceline on the node.

        Raises:
            NoAnswerError: The program gave no answer. The message has the last line of its output.
        """
        words = foreign_python.words(python or self.python, mode, installed=True)
        done = self.run(words, input=program_of(program, mode, asked), timeout_s=timeout_s)
        return answer_in(done.stdout, done.stderr, done.returncode)


def program_of(program: str, mode: str, asked: Mapping[str, object], *, ends_at_once: bool = True) -> bytes:
    """Return source code for a node: the doctor's program `program`, and a call `mode(asked)`."""
    path = Path(__file__).with_name(f"{program}.py")
    return foreign_python.program(str(path), mode, asked, ends_at_once=ends_at_once)


def answer_in(stdout: bytes, stderr: bytes, returncode: int) -> dict[str, object]:
    """Parse the answer in a program's output, or raise NoAnswerError."""
    answer = foreign_python.answer_in(stdout)
    if answer is not None:
        return answer
    said = [line for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    raise NoAnswerError(said[-1].strip()[:300] if said else f"ended with {returncode} and said nothing")


def everywhere(
    patients: Sequence[Patient], question: Callable[[Patient], Result], timeout_s: float
) -> dict[str, Result | NoAnswerError]:
    """Send a request to all nodes in parallel. Return {node: answer or error}."""
    answers = all_within({patient.name: partial(question, patient) for patient in patients}, timeout_s + _SLACK_S)
    results: dict[str, Result | NoAnswerError] = {}
    for patient in patients:
        answer = answers[patient.name]
        if isinstance(answer, TimeoutError):
            # The thread of this request still waits for the node, so a second request would have to wait behind it.
            patient.gone = f"gave no answer in {timeout_s + _SLACK_S:g} s and was not asked again"
            results[patient.name] = NoAnswerError(patient.gone)
        elif isinstance(answer, Exception) and not isinstance(answer, NoAnswerError):
            # The answer has an unexpected form, or the error comes from a plug-in's link.
            results[patient.name] = NoAnswerError(f"{type(answer).__name__}: {answer}")
        else:
            results[patient.name] = answer
    return results


@dataclass(frozen=True, kw_only=True)
class NetworkPlace:
    """The interface, address and network by which other nodes reach a node."""

    interface: str
    address: str
    network: str


def common_network(nodes: Mapping[str, Interfaces], wanted: str | None = None) -> dict[str, NetworkPlace] | None:
    """Return {node: its address in a network that all nodes have}, or None.

    wanted: The only interface to consider; None for all.

    Of several networks, the largest is chosen. A single node uses loopback.
    """
    places = {name: _places(interfaces, wanted, len(nodes) == 1) for name, interfaces in nodes.items()}
    networks = [{place.network for place in node_places} for node_places in places.values()]
    # Compare networks, not interfaces, which may have different names on other nodes.
    common = set.intersection(*networks) if networks else set()
    # Skip a network in which two nodes have one address: this address belongs to a bridge on each node.
    common = {network for network in common if len(_addresses(places, network)) == len(nodes)}
    if not common:
        return None
    # The shortest prefix is the largest network. Of equally large networks, choose the alphabetically first.
    best = min(common, key=lambda network: (ipaddress.ip_network(network).prefixlen, network))
    return {name: next(place for place in node_places if place.network == best) for name, node_places in places.items()}


def same_machine(nodes: Mapping[str, Interfaces]) -> list[str]:
    """Return the names of nodes that are one machine (equal addresses), or []."""
    alike: dict[frozenset[str], list[str]] = {}
    for name, interfaces in nodes.items():
        alike.setdefault(addresses_of(interfaces), []).append(name)
    return next((names for addresses, names in alike.items() if addresses and len(names) > 1), [])


def addresses_of(interfaces: Interfaces) -> frozenset[str]:
    """Return a node's addresses at which other nodes may reach it."""
    return frozenset(
        address
        for name, (address, _) in interfaces.items()
        if not name.startswith(_OF_NO_USE) and not ipaddress.ip_address(address).is_loopback
    )


def _places(interfaces: Interfaces, wanted: str | None, alone: bool) -> list[NetworkPlace]:
    places = []
    for name, (address, prefix) in interfaces.items():
        is_loopback = ipaddress.ip_address(address).is_loopback
        if (name != wanted) if wanted else (name.startswith(_OF_NO_USE) or is_loopback != alone):
            continue
        places.append(
            NetworkPlace(
                interface=name, address=address, network=str(ipaddress.ip_network(f"{address}/{prefix}", strict=False))
            )
        )
    return places


def _addresses(places: Mapping[str, list[NetworkPlace]], network: str) -> set[str]:
    return {place.address for node_places in places.values() for place in node_places if place.network == network}
