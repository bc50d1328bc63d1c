"""The form in which scripts of each parser get their values."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import paceline as pl
from paceline.sweeps.fit.way import certain_way
from paceline.sweeps.points import job_of
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.start import check_points
from tests.helpers import make_job

#: Each parser's smallest script -> the words that it gets for lr=0.1 and sizes=[1, 2]; None for what is not certain.
SCRIPTS = {
    "argparse": (
        """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=float)
        parser.add_argument("--sizes", type=int, nargs="+")
        parser.parse_args()
        """,
        ["--lr", "0.1", "--sizes", "1", "2"],
    ),
    "argparse, a list in one word": (
        """
        import argparse, json
        parser = argparse.ArgumentParser()
        parser.add_argument("--lr", type=float)
        parser.add_argument("--sizes", type=json.loads)
        parser.parse_args()
        """,
        ["--lr", "0.1", "--sizes", "[1, 2]"],
    ),
    "click": ("import click\n@click.command()\n@click.option('--lr')\ndef main(lr): ...", None),
    "fire": ("import fire\ndef main(lr, sizes): ...\nfire.Fire(main)", None),
    "jsonargparse": ("from jsonargparse import CLI\nCLI()", None),
    "tyro": (
        "import tyro\ndef main(lr: float, sizes: list[int]): ...\ntyro.cli(main)",
        ["--lr", "0.1", "--sizes", "1", "2"],
    ),
    "absl": (
        "from absl import app, flags\nflags.DEFINE_float('lr', 0.1, '')\napp.run(print)",
        ["--lr=0.1", "--sizes=[1, 2]"],
    ),
    "hydra": (
        "import hydra\n@hydra.main(config_path='conf', config_name='config')\ndef main(cfg): ...",
        ["lr=0.1", "sizes=[1, 2]"],
    ),
    "hydra without a configuration": (
        "import hydra\n@hydra.main(version_base=None)\ndef main(cfg): ...",
        ["+lr=0.1", "+sizes=[1, 2]"],
    ),
    "OmegaConf": ("from omegaconf import OmegaConf\ncfg = OmegaConf.from_cli()", ["lr=0.1", "sizes=[1, 2]"]),
    "by hand, with dashes": (
        "import sys\nfor word in sys.argv[1:]:\n    assert word.startswith('--')\n    key, value = word.split('=')",
        ["--lr=0.1", "--sizes=[1, 2]"],
    ),
    "by hand": ("import sys\nfound = dict(word.split('=') for word in sys.argv[1:])", ["lr=0.1", "sizes=[1, 2]"]),
    "by hand, in another file": ("exec(open('configurator.py').read())", ["--lr=0.1", "--sizes=[1, 2]"]),
    "by hand, by place": ("import sys\nlr = float(sys.argv[2])", None),
    "two parsers": ("import fire, hydra", None),
    "none": ("print('hello')", None),
}


def found(tmp_path: Path, script: str, space: dict[str, Any], pass_as: str = "arguments") -> list[str]:
    (tmp_path / "train.py").write_text(dedent(script))
    (tmp_path / "configurator.py").write_text(dedent(SCRIPTS["by hand, with dashes"][0]))
    spec = SweepSpec(space=Space(space), metric="loss", goal="minimize", seed=1, pass_as=pass_as)
    checked = check_points(make_job(), spec, tmp_path)
    values = checked.space.values(checked.space.draw(lambda dimension: dimension.expression.raw_at(0.5)))
    return list(job_of(make_job(), values, checked.pass_as, tmp_path, checked.switches).arguments)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_gets_its_values_in_the_form_that_it_reads(tmp_path: Path, name: str) -> None:
    script, words = SCRIPTS[name]
    space = {"lr": pl.choice(0.1), "sizes": pl.choice([[1, 2]])}
    assert found(tmp_path, script, space) == (words or ["--lr", "0.1", "--sizes", "[1, 2]"])
    if words is None:
        assert certain_way(tmp_path / "train.py") is None


def test_switches_of_tyro_are_found(tmp_path: Path) -> None:
    script = SCRIPTS["tyro"][0]
    assert found(tmp_path, script, {"amp": pl.choice(False), "model": {"amp": pl.choice(False)}}) == [
        "--no-amp",
        "--model.no-amp",
    ]


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("equals", ["--lr=-0.5", "--sizes=[1, 2]"]),
        ("--name=value", ["--lr=-0.5", "--sizes=[1, 2]"]),
        ("--name value value", ["--lr", "-0.5", "--sizes", "1", "2"]),
        ("+name=value", ["+lr=-0.5", "+sizes=[1, 2]"]),
        ("name=value", ["lr=-0.5", "sizes=[1, 2]"]),
    ],
)
def test_a_form_that_is_asked_for_counts(tmp_path: Path, form: str, words: list[str]) -> None:
    assert found(tmp_path, "import fire", {"lr": pl.choice(-0.5), "sizes": pl.choice([[1, 2]])}, form) == words
