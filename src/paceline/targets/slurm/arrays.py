"""Runs that are alike as tasks of one job array: one sbatch for all of them, each task one run.

    runs <sweep>_0 ... <sweep>_7          --array=0-7                task n runs <sweep>_<n>
    runs <sweep>_2040 ... <sweep>_2047    --array=40-47              task n runs <sweep>_2<n, three digits>

A task's number says which run it is, in the script and in the name of its output file alike, where Slurm knows no sum but
leading zeros. Numbers from 1000 on are taken without their thousands: by default Slurm has none above 1000 (MaxArraySize).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.targets.base import ALIKE_SPAN as SPAN


@dataclass(frozen=True, kw_only=True)
class Array:
    """Runs `<parent>_<first>` to `<parent>_<last>`; at_once: so many run at a time."""

    parent: str
    first: int
    last: int
    at_once: int

    @classmethod
    def of(cls, run_ids: Sequence[str], at_once: int) -> Array:
        """The array of runs whose ids are a parent's with numbers that follow each other, all of one span."""
        parent, _, first = run_ids[0].rpartition("_")
        found = cls(parent=parent, first=int(first), last=int(first) + len(run_ids) - 1, at_once=at_once)
        assert list(run_ids) == [f"{parent}_{number}" for number in range(found.first, found.last + 1)], run_ids
        assert found.first // SPAN == found.last // SPAN, run_ids
        return found

    @property
    def name(self) -> str:
        """Stands for a run's id in the name of the job."""
        return f"{self.parent}_{self.first}-{self.last}"

    @property
    def tasks(self) -> range:
        """The numbers of its tasks, in order of its runs."""
        return range(self.first % SPAN, self.last % SPAN + 1)

    @property
    def option(self) -> str:
        tasks = self.tasks
        limit = f"%{self.at_once}" if self.at_once < len(tasks) else ""
        return f"--array={tasks[0]}-{tasks[-1]}{limit}"

    @property
    def file_pattern(self) -> str:
        """The run's id as sbatch's names of output files have it."""
        thousands = self.first // SPAN
        return f"{self.parent.replace('%', '%%')}_{f'{thousands}%3a' if thousands else '%a'}"

    @property
    def shell_word(self) -> str:
        """The run's id as bash reads it, within double quotes."""
        return f"{self.parent}_$(({self.first // SPAN * SPAN} + SLURM_ARRAY_TASK_ID))"


def listed_id(environment: Mapping[str, str]) -> str:
    """The job that a process is in, as squeue lists it: of a task `<array>_<task>`; "" where it is in none."""
    array, task = environment.get("SLURM_ARRAY_JOB_ID"), environment.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environment.get("SLURM_JOB_ID", "")
