"""Compare any number of runs in a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypedDict

from paceline.errors import UserError
from paceline.reports import diff
from paceline.runs import read
from paceline.runs.folder import RunFolder
from paceline.runs.metrics import json_safe
from paceline.runs.search.facts import RunFacts, read_facts

if TYPE_CHECKING:
    import pandas

#: Kind of a fact about a run -> title of its section in the table. The table has this order.
KINDS = {
    "parameters": "Parameters",
    "metrics": "Metrics",
    "topology": "Topology",
    "settings": "Settings",
    "code": "Code",
    "data": "Data",
    "environment": "Environment",
}

#: A function that returns the facts of a run; None if the run has no readable record.
FactsOf: TypeAlias = "Callable[[RunFolder], RunFacts | None]"
#: The summary values of a metric. Each value has a row of its own in the table.
PARTS = ("last", "best", "min", "max")


class FactJson(TypedDict):
    """A fact and its value in each run, as JSON."""

    kind: str
    name: str
    part: str
    values: list[object]


class TableJson(TypedDict):
    """The table of compared runs, as JSON."""

    runs: list[str]
    facts: list[FactJson]


@dataclass(frozen=True, kw_only=True)
class ComparedFact:
    """One row of a table of runs: a fact and its values.

    Attributes:
        kind: "parameters", "metrics", "topology", "settings", "code", "data" or "environment".
        part: Which value of a metric is compared: "last", "best", "min" or "max"; "" for other facts.
        values: The value in each run, or None if the run does not have the fact.
    """

    kind: str
    name: str
    part: str = ""
    values: tuple[object, ...]

    @property
    def title(self) -> str:
        """The fact's name and, for a metric, the part such as "best"."""
        return f"{self.name} {self.part}" if self.part else self.name

    @property
    def differs(self) -> bool:
        """Whether the runs have different values. NaN equals NaN."""
        return not all(diff.is_equal(value, self.values[0]) for value in self.values)


@dataclass(frozen=True, kw_only=True)
class RunTable:
    """The facts of several runs, grouped by kind.

    Within a kind, facts that differ between the runs come first.

    Attributes:
        runs: The runs' ids, in the order of each fact's `values`.
    """

    runs: tuple[str, ...]
    facts: tuple[ComparedFact, ...]

    def differences(self) -> RunTable:
        """Return only the table's facts that differ between the runs."""
        return RunTable(runs=self.runs, facts=tuple(fact for fact in self.facts if fact.differs))

    def to_json(self) -> TableJson:
        """Return the table as JSON values; NaN and the infinities become strings."""
        return {
            "runs": [*self.runs],
            "facts": [
                {"kind": fact.kind, "name": fact.name, "part": fact.part, "values": json_safe([*fact.values])}
                for fact in self.facts
            ],
        }

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas frame: a column for each run, indexed by kind, name and part.

        Raises:
            UserError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise UserError("to_pandas() needs pandas: pip install 'paceline[tabular]'.") from error
        keys = [(fact.kind, fact.name, fact.part) for fact in self.facts]
        index = pandas.MultiIndex.from_tuples(keys, names=["kind", "name", "part"]) if keys else None
        return pandas.DataFrame([fact.values for fact in self.facts], index=index, columns=[*self.runs], dtype=object)


def run_table(folders: Sequence[RunFolder], facts: FactsOf = read_facts) -> RunTable:
    """Return a table that compares the facts of these runs.

    Args:
        folders: The folders of one or more runs.
        facts: A function that returns the parameters and metrics of a run, such as one that reads an index of runs.

    Raises:
        RunNotFoundError: The record of a run can't be read.
    """
    columns = [_values(folder, facts(folder)) for folder in folders]
    rows: list[ComparedFact] = []
    for kind in KINDS:
        of_runs = [column[kind] for column in columns]
        keys = dict.fromkeys(key for found in of_runs for key in found)
        of_kind = [
            ComparedFact(kind=kind, name=name, part=part, values=tuple(found.get((name, part)) for found in of_runs))
            for name, part in keys
        ]
        # Show facts that differ between the runs first. The sort is stable, so the facts otherwise keep their order.
        rows += sorted(of_kind, key=lambda fact: not fact.differs)
    return RunTable(runs=tuple(folder.run_id for folder in folders), facts=tuple(rows))


def _values(folder: RunFolder, facts: RunFacts | None) -> dict[str, dict[tuple[str, str], object]]:
    """Return a run's facts as kind -> (name, metric part or "") -> value."""
    sides: dict[str, dict[str, object]] = diff.sides(folder, read.record(folder))
    if facts is not None:
        # Name arguments without dashes, as the search for runs does. Add the values that sweeps and trackers have set.
        others = {name: value for name, value in sides["parameters"].items() if name == "script" or name[:1] == "$"}
        sides["parameters"] = {**facts.params, **others}
    found = {kind: {(name, ""): value for name, value in values.items()} for kind, values in sides.items()}
    metrics = facts.metrics if facts is not None else {}
    found["metrics"] = {(name, part): getattr(one, part) for name, one in metrics.items() for part in PARTS}
    return found


def compact_facts(table: RunTable) -> list[list[object]]:
    """Return facts as `[kind, name, part, values]`, with one value if all are equal."""
    return [
        [fact.kind, fact.name, fact.part, [*map(_cell, fact.values if fact.differs else fact.values[:1])]]
        for fact in table.facts
    ]


def _cell(value: object) -> object:
    return json_safe(value) if isinstance(value, float) else value if type(value) is int else text_of(value)


def text_of(value: object) -> str:
    """Return a compared value as text; "" for None."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(json_safe(value), ensure_ascii=False)
