"""`paceline sweep`, as a user types it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.cli.terminal import Terminal
from tests.helpers import write_tree
from tests.sweeps.helpers import hide_matplotlib

SCRIPT = """
import sys
import paceline

x = float(sys.argv[sys.argv.index("--x") + 1])
paceline.Run.get_context().log("loss", x * x)
"""


@pytest.fixture
def cli(cli: Cli) -> Cli:
    """Without PNGs of the sweeps: no test here reads them."""
    hide_matplotlib(cli.folder / ".paceline")
    return cli


SPACE = ("--param", "x=choice(-2, 1, 3)", "--metric", "loss", "--minimize", "--sampler", "grid")


@pytest.mark.promise("sweep-tries-points-runs-their")
def test_sweep_commands_run_show_and_best_report_the_same_trials_as_the_dry_run(cli: Any) -> None:
    write_tree(cli.folder, {"train.py": SCRIPT})
    shown = cli("sweep", "run", "train.py", *SPACE, "--dry-run")
    assert shown.stdout.splitlines() == ["train.py --x -2", "train.py --x 1", "train.py --x 3"]
    assert "3 points; the first 3 of 20 trials" in shown.stderr
    assert not (cli.folder / ".paceline" / "runs").exists()

    variables = cli("sweep", "run", "train.py", *SPACE, "--dry-run", "--pass-as", "environment")
    assert variables.stdout.splitlines() == ["x=-2 train.py", "x=1 train.py", "x=3 train.py"]
    file = cli("sweep", "run", "train.py", *SPACE, "--dry-run", "--pass-as", "given.json")
    assert file.stdout.splitlines()[0] == 'train.py  # given.json: {"x": -2}'

    done = cli("sweep", "run", "train.py", *SPACE, "-e", "tuned", "--", "--epochs", "5")
    assert [line.split()[:3] for line in done.stdout.splitlines()] == [
        *(["TRIAL", "STATUS", "loss"], ["1", "Completed", "1"], ["0", "Completed", "4"], ["2", "Completed", "9"]),
    ]
    assert "trial 1 is Completed: loss 1" in done.stderr

    listed = cli.json("list")
    assert [(run["type"], run["status"]) for run in listed] == [("sweep", "Completed")]
    sweep = listed[0]["run_id"]
    assert len(cli.json("list", "--trials")) == 4
    # `status` without an id shows the sweep itself, not the sweep's last trial.
    assert cli.json("status")["run_id"] == sweep

    best = cli("sweep", "best", sweep)
    assert best.stdout.strip() == f"{sweep}_1"
    assert "x 1" in best.stderr
    assert cli.json("sweep", "best", sweep)["x"] == 1
    found = cli.json("sweep", "show", sweep, "--top", 2)
    assert [trial["trial"] for trial in found["trials"]] == [1, 0]
    assert found["sweep"]["metric"] == "loss"
    assert cli.json("show", best.stdout.strip())["job"]["arguments"] == ["--epochs", "5", "--x", "1"]
    assert "3 of 20 ended" in cli("sweep", "show", sweep).stdout
    assert cli("sweep", "show", sweep, "--html", "drawn.html").stdout == "drawn.html\n"
    assert f"Sweep {sweep}" in (cli.folder / "drawn.html").read_text()
    assert "can't be written" in cli("sweep", "show", sweep, "--html", "nowhere/drawn.html", code=2).stderr
    assert "is a folder" in cli("sweep", "show", sweep, "--html", ".", code=2).stderr
    # Without an id, each command uses the latest sweep. Each command can also print JSON.
    assert cli("sweep", "best").stdout == best.stdout
    assert cli("sweep", "show").stdout == cli("sweep", "show", sweep).stdout
    assert f"is a sweep. Ask for further trials, paceline sweep more {sweep}" in cli("rerun", sweep, code=1).stderr
    for words in (("stop", sweep), ("resume", sweep)):
        assert (cli.json("sweep", *words)["run_id"], cli.json("sweep", *words)["status"]) == (sweep, "Completed")
    assert "--top must be 0 (all) or more, got -1." in cli("sweep", "show", sweep, "--top", -1, code=2).stderr


@pytest.mark.promise("several-metrics-pareto-front-python")
def test_sweep_of_several_metrics_shows_its_pareto_front(cli: Any) -> None:
    write_tree(cli.folder, {"train.py": SCRIPT.replace("x * x)", "x * x)\npaceline.Run.get_context().log('size', -x)")})
    words = ("--param", "x=choice(-2, 1, 3)", "--metric", "loss=minimize", "--metric", "size=minimize")
    done = cli("sweep", "run", "train.py", *words, "--sampler", "grid")
    assert "Pareto front: trials 1, 2" in done.stderr
    sweep = cli.json("list")[0]["run_id"]
    assert "loss, to minimize; size, to minimize" in cli("sweep", "show", sweep).stdout
    assert [trial["trial"] for trial in cli.json("sweep", "show", sweep)["trials"]] == [1, 2, 0]
    best = cli("sweep", "best", sweep)
    assert best.stdout.split() == [f"{sweep}_1", f"{sweep}_2"]
    assert "loss 9, size -3: x 3" in best.stderr
    assert [trial["size"] for trial in cli.json("sweep", "best", sweep)] == [-1, -3]
    for said, words in {
        "--metric size needs a goal, because there are several metrics": (
            "--metric",
            "loss=minimize",
            "--metric",
            "size",
        ),
        "policies judge trials by one": ("--metric", "a=minimize", "--metric", "b=minimize", "--stop", "median"),
        "--warm-start with the sampler 'random'": ("--metric", "loss", "--warm-start", sweep[:-2]),
        "it did not vary y": ("--metric", "loss", "--sampler", "tpe", "--warm-start", sweep),
    }.items():
        assert said in cli("sweep", "run", "train.py", "--param", "y=uniform(0,1)", *words, code=2).stderr, said
    known = cli("sweep", "run", "train.py", *SPACE[:5], "--sampler", "tpe", "--warm-start", sweep, "--dry-run")
    assert len(known.stdout.splitlines()) == 3


@pytest.mark.promise("switch-script-s-tuned-like")
def test_sweep_is_read_from_a_file(cli: Any) -> None:
    write_tree(
        cli.folder,
        {
            "src/train.py": SCRIPT,
            "sweep.yaml": (
                "source_directory: src\nentry_script: train.py\nexperiment: tuned\nsweep:\n"
                "  space:\n    x: [1, 2]\n    model: {layers: 'randint(2, 3)'}\n"
                "  metric: loss\n  goal: minimize\n  sampler: grid\n  trials: 9\n"
            ),
        },
    )
    shown = cli.json("sweep", "run", "sweep.yaml", "--trials", 1, "--dry-run")
    assert shown["arguments"] == [["--x", "1", "--model.layers", "2"]]
    assert shown["sweep"]["goal"] == "minimize"
    fast = cli.json("sweep", "run", "sweep.yaml", "--param", "x=true", "--switch", "x/no-x", "--trials", 1, "--dry-run")
    assert fast["arguments"] == [["--x", "--model.layers", "2"]]
    assert fast["sweep"]["switches"] == ["--x/--no-x"]
    (cli.folder / "sweep.yaml").write_text("entry_script: train.py\nsweep: {metrics: loss}\n")
    assert "unknown key 'metrics'" in cli("sweep", "run", "sweep.yaml", code=2).stderr
    (cli.folder / "sweep.yaml").write_text(
        "source_directory: gone\nentry_script: train.py\nsweep: {metric: loss, space: {x: 1}}\n"
    )
    for words in (("sweep", "run", "sweep.yaml"), ("sweep", "run", "sweep.yaml", "--dry-run")):
        assert "gone' is not a folder" in cli(*words, code=2).stderr


@pytest.mark.promise("wrong-sweep-refused-before-anything")
def test_wrong_sweep_calls_are_refused_before_anything_starts(cli: Any, tmp_path: Path) -> None:
    parsed = "import argparse\np = argparse.ArgumentParser()\np.add_argument('--x')\np.parse_args()\n"
    write_tree(cli.folder, {"train.py": SCRIPT, "parsed.py": parsed})
    wrong = {
        "a sweep needs hyperparameters": ("--metric", "loss"),
        "say by which metric": ("--param", "x=uniform(0,1)"),
        "is not NAME=EXPRESSION": ("--metric", "loss", "--param", "x"),
        "there is no uniforn": ("--metric", "loss", "--param", "x=uniforn(0,1)"),
        "there is no policy 'ashe'": ("--metric", "loss", "--param", "x=uniform(0,1)", "--stop", "ashe"),
        "bandit has slack_factor": ("--metric", "loss", "--param", "x=uniform(0,1)", "--stop", "bandit(0.1)"),
        "--sampler 'bayes'": ("--metric", "loss", "--param", "x=uniform(0,1)", "--sampler", "bayes"),
        "has no end of values": ("--metric", "loss", "--param", "x=uniform(0,1)", "--sampler", "grid"),
        "is not NAME=VALUE": ("--metric", "loss", "--param", "x=uniform(0,1)", "--point", "0.5"),
        "--pass-as 'env'": ("--metric", "loss", "--param", "x=uniform(0,1)", "--pass-as", "env"),
        "--y is not one of its options": ("-e", "other", "--metric", "loss", "--param", "y=uniform(0,1)"),
        "pbt needs interval and last, as in pbt(interval=..., last=...)": (
            *("--metric", "loss", "--param", "x=uniform(0,1)", "--stop", "pbt"),
        ),
        "promote='yes': write true": ("--metric", "loss", "--param", "x=uniform(0,1)", "--stop", "asha(promote=yes)"),
        "budget='--epochs': the space does not fit": (
            *("-e", "other", "--metric", "loss", "--param", "x=uniform(0,1)"),
            *("--stop", "asha(promote=true, last=9, budget=--epochs)"),
        ),
        "--trials 0": ("--metric", "loss", "--param", "x=uniform(0,1)", "--trials", "0"),
        "choose a target of kind slurm or kubernetes": (
            "--metric",
            "loss",
            "--param",
            "x=uniform(0,1)",
            "--array-size",
            "4",
        ),
        "experiment name 'a b'": ("--metric", "loss", "--param", "x=uniform(0,1)", "--experiment", "a b"),
        "notify: ": ("--metric", "loss", "--param", "x=uniform(0,1)", "--notify", "true"),
    }
    for message, words in wrong.items():
        script = "parsed.py" if "-e" in words else "train.py"
        # A dry run reports the same error as a real submission.
        assert message in cli("sweep", "run", script, *words, "--dry-run", code=2).stderr, message
    words = ("--metric", "loss", "--param", "x=uniform(0,1)", "--trials", "0")
    assert "--trials 0" in cli("sweep", "run", "train.py", *words, code=2).stderr
    assert "is not a sweep" in _of_a_run(cli)
    assert [run["type"] for run in cli.json("list")] == ["script"]


def _of_a_run(cli: Any) -> str:
    cli("run", "train.py", "-q", "--", "--x", "1")
    return str(cli("sweep", "show", cli.json("list")[0]["run_id"], code=2).stderr)


SLOW = """
import sys, time
import paceline

for step in range(6000):
    paceline.Run.get_context().log("loss", 1 / (1 + step))
    time.sleep(0.1)
"""


@pytest.mark.promise("sweep-live-table-terminal-notebook")
def test_sweep_on_a_terminal_shows_a_table_and_ctrl_c_prints_how_to_reattach(cli: Any) -> None:
    write_tree(cli.folder, {"train.py": SLOW})
    words = ("sweep", "run", "train.py", *SPACE[:2], "--metric", "loss", "--minimize")
    terminal = Terminal(cli, *words, "--trials", "2", "--concurrent", "2")
    try:
        terminal.read_until("0 of 2 trials ended, 2 running")
        terminal.press("\x03")
        terminal.read_until("See it again: paceline sweep show -f ")
        assert terminal.exit_code() == 130
    finally:
        terminal.close()
    (sweep,) = [run["run_id"] for run in cli.json("list")]
    again = Terminal(cli, "sweep", "show", "-f", sweep)
    try:
        again.read_until("Best: trial")
        cli("sweep", "stop", sweep)
        # When the sweep ends, its last table remains on the screen.
        again.read_until("is Canceled in")
        assert again.exit_code() == 143
    finally:
        again.close()


def test_sweep_yaml_of_the_sweep_example_has_the_same_settings_as_its_python_script(cli: Any) -> None:
    source = Path(__file__).parents[2] / "examples" / "sweep"
    shown = cli.json("sweep", "run", source / "sweep.yaml", "--dry-run")
    program = (source / "submit.py").read_text()
    stop = shown["sweep"]["stop"]
    assert f"ASHA(first={stop['first']}, eta={stop['eta']}, last={stop['last']})" in program
    for name in ("trials", "concurrent", "seed"):
        assert f"{name}={shown['sweep'][name]}," in program
    assert len(shown["points"]) == 6
    assert "there is no sweep in" in cli("sweep", "show", code=2).stderr


GOES_ON = """
import os, sys
import paceline

x, epochs = (float(sys.argv[sys.argv.index(name) + 1]) for name in ("--x", "--epochs"))
path = os.path.join(os.environ["PACELINE_CHECKPOINT_DIR"], "epoch")
first = int(open(path).read()) if os.path.exists(path) else 0
for epoch in range(first, int(epochs)):
    open(path, "w").write(str(epoch + 1))
    paceline.Run.get_context().log("score", x + epoch / 100, step=epoch)
"""


def test_sweep_show_includes_resumed_trials(cli: Any) -> None:
    write_tree(
        cli.folder,
        {
            "train.py": GOES_ON,
            "sweep.yaml": (
                "entry_script: train.py\nsweep:\n  space: {x: [0.4, 0.3]}\n  metric: score\n  sampler: grid\n"
                "  concurrent: 1\n  stop: asha(first=2, eta=2, last=3, promote=true, budget=--epochs)\n"
            ),
        },
    )
    # ASHA starts each trial with the epochs of the first rung.
    dry = cli("sweep", "run", "sweep.yaml", "--dry-run").stdout.splitlines()
    assert dry == ["train.py --x 0.4 --epochs 2", "train.py --x 0.3 --epochs 2"]
    done = cli("sweep", "run", "sweep.yaml", "-e", "tuned")
    sweep = cli.json("list")[0]["run_id"]
    assert (
        f"trial 0 goes on as {sweep}_0_2: ASHA: its best of 0.41 after 2 values is among the best 1 of 2" in done.stderr
    )
    assert cli("sweep", "best", sweep).stdout.strip() == f"{sweep}_0_2"
    found = cli.json("sweep", "show", sweep)
    assert [(row["run_id"], row["from"], row["intervals"]) for row in found["runs"]] == [
        *((f"{sweep}_0", None, 2), (f"{sweep}_0_2", f"{sweep}_0", 1), (f"{sweep}_1", None, 2)),
    ]
    assert [(row["trial"], row["intervals"]) for row in found["trials"]] == [(0, 3), (1, 2)]
    shown = cli("show", f"{sweep}_0_2").stdout
    assert f"From:        {sweep}_0\n" in shown
    assert "Why:         ASHA: its best of 0.41" in shown
    assert cli.json("show", f"{sweep}_0_2")["trial"]["from"] == f"{sweep}_0"
    assert cli.json("list")[0]["run_id"] == sweep
    assert len(cli.json("list", "--trials")) == 4
