"""The form in which scripts of each parser get their values."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
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


#: A script with a list and switches -> the words that it gets, and what it reads of them.
LISTS = {
    "argparse's append": (
        """
        import argparse
        parser = argparse.ArgumentParser()
        parser.add_argument("--size", type=int, action="append")
        parser.add_argument("--shout", action="store_true")
        parser.add_argument("--amp", action=argparse.BooleanOptionalAction)
        given = parser.parse_args()
        print(given.size, given.shout, given.amp)
        """,
        ["--size=1", "--size=2", "--shout", "--no-amp"],
    ),
    "click's multiple": (
        """
        import click
        @click.command()
        @click.option("--size", type=int, multiple=True)
        @click.option("--shout", is_flag=True)
        @click.option("--amp/--fp32", default=True)
        def main(size, shout, amp): print([*size], shout, amp)
        main()
        """,
        ["--size=1", "--size=2", "--shout", "--fp32"],
    ),
    "click's nargs": (
        """
        from click import command, option
        @command()
        @option("--size", "-s", type=int, nargs=2)
        @option("--shout/--no-shout")
        @option("--amp", type=bool)
        def main(size, shout, amp): print([*size], shout, amp)
        main()
        """,
        ["--size", "1", "2", "--shout", "--amp", "False"],
    ),
    "absl's multi": (
        """
        from absl import app, flags
        flags.DEFINE_multi_integer("size", [3], "")
        flags.DEFINE_bool("shout", False, "")
        flags.DEFINE_bool("amp", True, "")
        given = flags.FLAGS
        app.run(lambda _: print(given.size, given.shout, given.amp))
        """,
        ["--size=1", "--size=2", "--shout=True", "--amp=False"],
    ),
    "absl's list": (
        """
        from absl import app, flags
        flags.DEFINE_list("size", [], "")
        flags.DEFINE_bool("shout", False, "")
        flags.DEFINE_bool("amp", True, "")
        given = flags.FLAGS
        app.run(lambda _: print([*map(int, given.size)], given.shout, given.amp))
        """,
        ["--size=1,2", "--shout=True", "--amp=False"],
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_and_switches_arrive_as_the_script_reads_them(tmp_path: Path, name: str) -> None:
    script, words = LISTS[name]
    space = {"size": pl.choice([[1, 2]]), "shout": pl.choice(True), "amp": pl.choice(False)}
    assert found(tmp_path, script, space) == words
    if find_spec(name.partition("'")[0]) is not None:
        argv = [sys.executable, tmp_path / "train.py", *words]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("[1, 2] True False\n", "")


def test_click_s_flag_whose_default_is_on_is_not_taken_for_a_switch(tmp_path: Path) -> None:
    # What `--amp` does to it differs from one version of click to the next.
    script = "import click\n@click.command()\n@click.option('--amp', is_flag=True, default=True)\ndef main(amp): ..."
    assert found(tmp_path, script, {"amp": pl.choice(False)}) == ["--amp", "False"]


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
        ("--name=value --name=value", ["--lr=-0.5", "--sizes=1", "--sizes=2"]),
        ("--name=value,value", ["--lr=-0.5", "--sizes=1,2"]),
        ("--name value value", ["--lr", "-0.5", "--sizes", "1", "2"]),
        ("+name=value", ["+lr=-0.5", "+sizes=[1, 2]"]),
        ("name=value", ["lr=-0.5", "sizes=[1, 2]"]),
    ],
)
def test_a_form_that_is_asked_for_counts(tmp_path: Path, form: str, words: list[str]) -> None:
    assert found(tmp_path, "import fire", {"lr": pl.choice(-0.5), "sizes": pl.choice([[1, 2]])}, form) == words
