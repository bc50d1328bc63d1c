"""Asking nodes, several at once, without ever waiting for one that hangs.

A node that has not answered in time is not asked again: whatever holds it up holds up the next question too, and a
doctor that takes an hour over a broken cluster is no help.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paceline.errors import PacelineError
from paceline.remote import call
from paceline.targets.timeouts import all_within

if TYPE_CHECKING:
    from paceline.remote.link.link import CommandEnd, Link

#: Beyond what a question itself may take.
_SLACK_S = 5.0

Result = TypeVar("Result")


class NoAnswerError(Exception):
    """A node gave no answer, or not one that can be used; the message says what it gave."""


@dataclass
class Patient:
    """A node that is examined. gone: why it is asked nothing any more."""

    link: Link
    gone: str | None = None

    @property
    def name(self) -> str:
        return self.link.name

    @property
    def python(self) -> str:
        """The interpreter that the agent runs in."""
        return str(self.link.hello.python[0])

    def run(self, argv: Sequence[str], *, input: bytes = b"", timeout_s: float = 60.0) -> CommandEnd:
        """A command on the node: its returncode, stdout and stderr.

        Raises:
            NoAnswerError: it did not end in time, or the node is lost.
        """
        return self.call(lambda: self.link.run(argv, input=input, timeout_s=timeout_s), timeout_s)

    def call(self, request: Callable[[], Result], timeout_s: float = 60.0) -> Result:
        """Make a request of the link; its result.

        Raises:
            NoAnswerError: it failed, or the node is lost.
        """
        if self.gone:
            raise NoAnswerError(self.gone.removeprefix(f"{self.name}: "))
        try:
            return request()
        # An OSError is the node's own answer, "no such file". A link's error with a living link is a time-out.
        except (OSError, PacelineError) as error:
            self.gone = self.link.lost
            if self.gone or not isinstance(error, PacelineError):
                raise NoAnswerError((self.gone or str(error)).removeprefix(f"{self.name}: ")) from error
            raise NoAnswerError(f"no answer in {timeout_s:g} s") from error

    def ask(
        self, program: str, mode: str, asked: Mapping[str, Any], *, python: str | None = None, timeout_s: float = 60.0
    ) -> dict[str, Any]:
        """The answer of one of the programs beside this file, run on the node.

        program: "on_node" or "reduce_on_node". python: the interpreter, the agent's own unless named.

        Raises:
            NoAnswerError: there is none; the message has the program's last line.
        """
        words = call.words(python or self.python, mode, installed=True)
        done = self.run(words, input=program_of(program, mode, asked), timeout_s=timeout_s)
        return answer_in(done.stdout, done.stderr, done.returncode)


def program_of(program: str, mode: str, asked: Mapping[str, Any], *, ends_at_once: bool = True) -> bytes:
    """The text of one of the programs beside this file, as `Patient.ask` has them run."""
    path = Path(__file__).with_name(f"{program}.py")
    return call.program(str(path), mode, asked, ends_at_once=ends_at_once)


def answer_in(stdout: bytes, stderr: bytes, returncode: int) -> dict[str, Any]:
    """The value that a program of the doctor's printed.

    Raises:
        NoAnswerError: it printed none.
    """
    found = call.answer_in(stdout)
    if found is not None:
        return found
    said = [line for line in stderr.decode(errors="replace").splitlines() if line.strip()]
    raise NoAnswerError(said[-1].strip()[:300] if said else f"ended with {returncode} and said nothing")


def everywhere(
    patients: Sequence[Patient], question: Callable[[Patient], Result], timeout_s: float
) -> dict[str, Result | NoAnswerError]:
    """Ask all nodes at once; their answers by name. All are asked at once; one that takes longer than `timeout_s` is given up."""
    answers = all_within({patient.name: partial(question, patient) for patient in patients}, timeout_s + _SLACK_S)
    found: dict[str, Result | NoAnswerError] = {}
    for patient in patients:
        answer = answers[patient.name]
        if isinstance(answer, TimeoutError):
            # Its thread still waits; a second question would wait behind the first one.
            patient.gone = f"gave no answer in {timeout_s + _SLACK_S:g} s and was not asked again"
            found[patient.name] = NoAnswerError(patient.gone)
        elif isinstance(answer, Exception) and not isinstance(answer, NoAnswerError):
            # A value of another shape than was asked for, or a plug-in's link.
            found[patient.name] = NoAnswerError(f"{type(answer).__name__}: {answer}")
        else:
            found[patient.name] = answer
    return found
