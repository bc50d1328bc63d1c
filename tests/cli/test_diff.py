"""`paceline diff`, and `paceline usage` of the same runs."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import Cli


@pytest.mark.promise("two-runs-compared-made-them")
def test_diff_compares_two_runs_and_usage_sums_their_resources(cli: Cli) -> None:
    script = """
        import sys
        from paceline import Run
        for step in range(3):
            Run.get_context().log("loss", 1.0 if step < 2 else float(sys.argv[1]), step=step)
        """
    name = cli.script(script)
    first = json.loads(cli("run", "--json", name, "--", "0.5").stdout)["run_id"]
    cli.script(f"{script}print('hello')\n")
    second = json.loads(cli("run", "--json", name, "--", "0.25").stdout)["run_id"]
    said = cli("diff", first, second).stdout
    assert "argument 1  0.5  0.25" in said
    assert "train.py  changed  +1 -0" in said
    assert "+print('hello')" in said
    assert "loss  step 2" in said
    assert "The same: settings, git, environment, data, topology" in said
    found = cli.json("diff", first, second)
    assert (found["parting"]["name"], found["parting"]["step"]) == ("loss", 2)
    assert "no run 'fit'" in cli("diff", first, "fit", code=2).stderr

    used = cli.json("usage", "--by", "experiment")
    assert used["all"]["runs"] == 2
    assert used["all"]["core_hours"] > 0
    assert cli.folder.name[:20] in cli("usage").stdout
    assert "choose one of user, experiment, target, week" in cli("usage", "--by", "nobody", code=2).stderr
    assert "No runs" in cli("usage", "--since", "0s").stdout
    (divided,) = cli.json("usage", "--goodput")
    assert sum(divided["percent"].values()) == pytest.approx(100)
    assert "ETTR" in cli("usage", "--goodput").stdout
    assert "Add --goodput" in cli("usage", "calm-heron", code=2).stderr
