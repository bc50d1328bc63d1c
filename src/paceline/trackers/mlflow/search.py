"""Search runs by MLflow's filters and orders, with the index of runs.

The index has an entry for each run. This module first tests the entries by those conditions of the filter that the
index can decide: experiment, state, id, name, and tags and parameters that equal a text. So it does not read the
records of most runs. MLflow's own code then tests and sorts the remaining runs.

For MLflow, the latest value of a metric is the value with the greatest step of all ranks. Paceline's `last` is the
number that the lowest rank logged last, because scripts may log without steps, or restart at step 0 for each fold.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypedDict, cast

from mlflow.entities import Run, RunStatus
from mlflow.utils.search_utils import SearchUtils

from paceline.errors import PacelineError
from paceline.runs.folder import RunFolder
from paceline.runs.search.facts import LONG, RunFacts
from paceline.runs.search.fields import field_of, quoted
from paceline.runs.search.index import FactsCache, RunIndex
from paceline.runs.search.params import LONGEST, typed
from paceline.runs.search.query import Compare, Predicate
from paceline.trackers.mlflow import view

#: Number of runs to read at once. MLflow's own filter is then applied to these runs.
_BATCH = 100


class _Clause(TypedDict):
    """One comparison in an MLflow filter, as MLflow parses it."""

    type: str
    key: str
    comparator: str
    value: object


def search(
    runs_dir: Path, names: set[str], filter_text: str | None, order_by: Sequence[str] | None, stop: int
) -> list[Run]:
    """Return the matching runs of these experiments, in the order of `order_by`.

    Args:
        runs_dir: The workspace's folder of runs.
        names: Names of the experiments.
        filter_text: MLflow's filter.
        order_by: MLflow's order.
        stop: The number of runs that the caller needs. The result may have more runs.

    Raises:
        MlflowException: The filter or the order is invalid.
    """
    clauses = cast("list[_Clause]", SearchUtils.parse_search_filter(filter_text))
    tests = [test for test in map(_test, clauses) if test is not None]
    index = _index(runs_dir)
    index.refresh(everything=True)
    candidates = [
        facts for facts in index.entries() if facts.experiment in names and all(test(facts) for test in tests)
    ]
    sign = _sign(order_by)
    if sign:
        candidates.sort(key=lambda facts: (sign * int(1000 * (facts.started or facts.created or 0)), facts.run_id))
    found: list[Run] = []
    for first in range(0, len(candidates), _BATCH):
        batch = (_run(runs_dir, facts.run_id) for facts in candidates[first : first + _BATCH])
        found += SearchUtils.filter([run for run in batch if run is not None], filter_text)
        if sign and len(found) >= stop:
            break
    return cast("list[Run]", SearchUtils.sort(found, order_by))


@lru_cache(maxsize=4)
def _index(runs_dir: Path) -> RunIndex:
    # Don't read metric logs into the index (0 s), because MLflow's store reads metrics itself.
    return RunIndex(runs_dir, metrics_s=0.0, cache=FactsCache(runs_dir))


def _run(runs_dir: Path, run_id: str) -> Run | None:
    try:
        return view.run(RunFolder(runs_dir / run_id))
    except (PacelineError, OSError):
        return None  # the run was removed after the search had found it


def _sign(order_by: Sequence[str] | None) -> int:
    """Return 1 if `order_by` means ascending start time, -1 if descending, else 0."""
    if not order_by:
        return -1
    _, key, is_ascending = SearchUtils.parse_order_by_for_search_runs(order_by[0])
    is_start = len(order_by) == 1 and SearchUtils.translate_key_alias(key) == "start_time"
    return (1 if is_ascending else -1) if is_start else 0


def _test(clause: _Clause) -> Predicate | None:
    """Return a function that tells whether an index entry can match a filter's clause.

    Return None for a clause that the index alone can't decide.
    """
    key, value = clause["key"], clause["value"]
    if clause["comparator"] != "=" or not isinstance(value, str) or not 0 < len(value) < LONGEST or len(key) >= LONGEST:
        return None
    match clause["type"], SearchUtils.translate_key_alias(key):
        case "attribute", "run_id":
            return Compare(field_of("id"), "=", (value,)).test(0)
        case ("attribute", "run_name") | ("tag", "mlflow.runName"):
            return Compare(field_of("name"), "=", (value,)).test(0)
        case "attribute", "status":
            return lambda facts: RunStatus.to_string(view.status(facts.status)) == value
        case "tag", _ if not key.startswith(("mlflow.", "paceline.")):
            return Compare(field_of(f"tags.{quoted(key)}"), "=", (value,)).test(0)
        # Exclude NaN, which is not equal to any value, not even to NaN.
        case "parameter", _ if typed(value) == typed(value):
            return _param_test(key, value)
    return None


def _param_test(name: str, value: str) -> Predicate:
    """Return a test that excludes runs whose parameter surely has another value."""
    test = Compare(field_of(f"params.{quoted(name)}"), "=", (value,)).test(0)

    def passes(facts: RunFacts) -> bool:
        # If a sweep or an argument may also have set the parameter, let MLflow test the run: it shows other values.
        is_replaced = facts.is_child or f"{name}=" in facts.arguments or len(facts.arguments) >= LONG
        return is_replaced or name not in facts.params or test(facts)

    return passes
