"""Values that a script gets in other ways than as arguments, up to a script that reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.errors import SweepError
from tests.helpers import write_tree
from tests.sweeps.helpers import hide_matplotlib

#: This script reads the values in the way that its argument names, and logs their sum.
SCRIPT = """
import json, os, sys
import paceline

if sys.argv[1] == "environment":
    x, layers = float(os.environ["x"]), int(os.environ["model_layers"])
elif sys.argv[1] == "file":
    given = json.load(open("cfg/parameters.json"))
    x, layers = given["x"], given["model"]["layers"]
    assert given["model"]["width"] == 7
    assert given["kind"] is None
else:
    given = dict(word.split("=") for word in sys.argv[2:])
    x, layers = float(given["x"]), int(given["model.layers"])
paceline.Run.get_context().log("score", x + layers)
"""


# If a trial gets its values in a file, run two trials at once, because neither may read the other's file.
@pytest.mark.promise("script-gets-values-arguments-assignments")
@pytest.mark.parametrize(
    ("way", "xs"), [("environment", [0.5]), ("cfg/parameters.json", [0.5, 1.5]), ("assignments", [0.5])]
)
def test_script_receives_its_parameter_values_for_each_setting_of_pass_as(
    way: str, xs: list[float], tmp_path: Path, monkeypatch: Any
) -> None:
    hide_matplotlib(tmp_path / ".paceline")
    monkeypatch.setenv("PACELINE_LEASES", str(tmp_path / "leases"))
    own = '{"model": {"width": 7}, "x": 99}'
    write_tree(tmp_path / "source", {"train.py": SCRIPT, "cfg/parameters.json": own})
    word = "file" if way.endswith(".json") else way
    estimator = pl.Estimator(tmp_path / "source", entry_script="train.py", arguments=[word])
    space = {"--x": pl.choice(*xs), "model": {"layers": pl.choice(10)}, "kind": None}
    sweep = pl.Sweep(estimator, space, metric="score", sampler="grid", concurrent=2, pass_as=way)
    experiment = pl.Experiment(pl.Workspace(tmp_path / ".paceline"), "tuned")
    run = experiment.submit(sweep)
    run.wait_for_completion()
    assert [row["score"] for row in run.trial_rows()] == [10 + x for x in xs]
    # The working directory is removed, with all files that the script did not change.
    assert not (run.best_child().folder.work).exists()


def test_sweep_is_refused_if_pass_as_is_unknown_or_names_a_file_that_can_not_hold_the_values(tmp_path: Path) -> None:
    write_tree(tmp_path / "source", {"train.py": SCRIPT, "p.json": "[]"})
    estimator = pl.Estimator(tmp_path / "source", entry_script="train.py")
    with pytest.raises(SweepError, match="pass_as='env'"):
        pl.Sweep(estimator, {"x": 1}, metric="score", pass_as="env")
    experiment = pl.Experiment(pl.Workspace(tmp_path / ".paceline"), "tuned")
    with pytest.raises(SweepError, match=r"'p\.json' of the source, which the values replace in part"):
        experiment.submit(pl.Sweep(estimator, {"x": 1}, metric="score", pass_as="p.json"))
    assert not list(experiment.runs_dir.iterdir())
