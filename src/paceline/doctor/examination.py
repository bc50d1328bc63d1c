"""The state that the checks of one examination share: the nodes, what is wanted of them, and what has been learned so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.doctor.asking import NoAnswerError, Patient, everywhere
from paceline.doctor.finding import FAIL, SKIPPED, Finding
from paceline.doctor.network import NetworkPlace

#: For looking at a node: importing torch from a cold network folder takes tens of seconds.
FACTS_S = 90.0


@dataclass
class Examination:
    """The state of one examination.

    python: the interpreter that scripts will run in; None for that of each node's agent.
    folder: on the nodes, for runs and snapshots. interface: the network interface that is asked for.
    workspace_dir: on this machine. facts: by node, once they were asked for. places: by node, once a network was chosen.
    """

    patients: Sequence[Patient]
    folder: str
    workspace_dir: str
    python: str | None = None
    interface: str | None = None
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    places: dict[str, NetworkPlace] | None = None

    @property
    def well(self) -> list[Patient]:
        """The nodes that still answer."""
        return [patient for patient in self.patients if patient.gone is None]

    def python_of(self, patient: Patient) -> str:
        return self.python or patient.python

    def ask_all(
        self, check: str, question: Callable[[Patient], Any], timeout_s: float
    ) -> tuple[dict[str, Any], list[Finding]]:
        """Ask each node that still answers; the answers by name, and a failure for each node that gave none."""
        found, failed = {}, []
        # A node that gave no answer is `gone` from now on, so the next checks do not wait for it again.
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
                found[name] = answer
        return found, failed


def skipped(check: str, why: str) -> Finding:
    return Finding(check=check, level=SKIPPED, seen=why)
