"""A table of several runs, in Python and on the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

import paceline as pl
from paceline.errors import RunNotFoundError, WorkspaceError
from paceline.reports.compare import run_table
from paceline.runs import states
from paceline.runs.folder import RunFolder
from tests.cli.conftest import Cli, cli  # noqa: F401 - a fixture
from tests.helpers import make_job
from tests.ui.conftest import Place, log_values, place  # noqa: F401 - a fixture


def _runs(where: Place) -> list[RunFolder]:
    rates, made = (0.1, 0.2, 0.1), []
    for number, rate in enumerate(rates):
        folder = where.run(f"a_170000000{number}_00000001", job=make_job(arguments=("--lr", str(rate), "--deep")))
        log_values(folder, "val_acc", [0.5, 0.9 - number / 10, 0.7])
        made.append(folder)
    return made


def test_comparison_of_runs_marks_parameters_and_metrics_that_differ(place: Place) -> None:  # noqa: F811 - the fixture
    table = run_table(_runs(place))
    facts = {(fact.kind, fact.title): fact for fact in table.facts}
    assert facts["parameters", "lr"].values == (0.1, 0.2, 0.1)
    assert facts["metrics", "val_acc last"].values == (0.7, 0.7, 0.7)
    assert facts["metrics", "val_acc best"].values == pytest.approx((0.9, 0.8, 0.7))
    assert not facts["parameters", "deep"].differs
    assert {fact.title for fact in table.differences().facts} == {"lr", "val_acc best", "val_acc max"}


def test_nan_metrics_of_two_runs_compare_equal_and_are_written_as_valid_json(place: Place) -> None:  # noqa: F811 - the fixture
    folders = [place.run("a_1700000001_00000001"), place.run("b_1700000002_00000001")]
    for folder in folders:
        log_values(folder, "loss", [math.nan])
    table = run_table(folders)
    loss = next(fact for fact in table.facts if fact.title == "loss last")
    assert not loss.differs
    assert json.loads(json.dumps(table.to_json(), allow_nan=False))["runs"] == [folder.run_id for folder in folders]


def test_metric_missing_in_one_run_is_a_difference(place: Place) -> None:  # noqa: F811 - the fixture
    folders = [place.run("a_1700000001_00000001"), place.run("b_1700000002_00000001", states.FAILED, job=None)]
    log_values(folders[0], "loss", [1.0])
    loss = next(fact for fact in run_table(folders).facts if fact.title == "loss last")
    assert (loss.values, loss.differs) == ((1.0, None), True)


def test_workspace_compare_accepts_runs_or_run_ids_and_its_table_converts_to_a_pandas_frame(place: Place) -> None:  # noqa: F811 - the fixture
    folders = _runs(place)
    workspace = pl.Workspace(place.path)
    table = workspace.compare(workspace.get_run(folders[0].run_id), folders[1].run_id)
    assert table.runs == (folders[0].run_id, folders[1].run_id)
    with pytest.raises(RunNotFoundError):
        workspace.compare("nope")
    with pytest.raises(WorkspaceError, match="needs runs"):
        workspace.compare()
    pytest.importorskip("pandas")
    frame = table.to_pandas()
    assert frame.loc[("parameters", "lr", ""), folders[1].run_id] == 0.2


def test_paceline_compare_prints_the_differing_parameters_and_metrics(cli: Cli) -> None:  # noqa: F811 - the fixture
    folders = _runs(Place(Path(cli.folder)))
    ids = [folder.run_id for folder in folders]
    said = cli("compare", *ids).stdout
    assert [line.split() for line in said.splitlines() if line.startswith("  lr")] == [["lr", "0.1", "0.2", "0.1"]]
    assert "deep" not in said
    assert "deep" in cli("compare", *ids, "--all").stdout
    assert cli.json("compare", *ids, "--value", "best") == {
        "runs": ids,
        "facts": [
            {"kind": "parameters", "name": "lr", "part": "", "values": [0.1, 0.2, 0.1]},
            {"kind": "metrics", "name": "val_acc", "part": "best", "values": [0.9, 0.8, 0.7]},
        ],
    }
    assert cli("compare", *ids, "--csv").stdout.splitlines()[1] == "parameters,lr,,0.1,0.2,0.1"
    assert (
        "--value 'mean': choose one of last, best, min, max, all."
        in cli("compare", *ids, "--value", "mean", code=2).stderr
    )
