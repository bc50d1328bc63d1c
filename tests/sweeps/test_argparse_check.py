"""Spaces compared with scripts. argparse refuses everything that is refused here, and nothing that it accepts is refused."""

from __future__ import annotations

import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import paceline as pl
from paceline.errors import SweepError
from paceline.sweeps.argparse_check import certain_way, check
from paceline.sweeps.points import job_of, words
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.start import check_points
from tests.helpers import make_job

PLAIN = """
import argparse
parser = argparse.ArgumentParser(description="digits")
parser.add_argument("--lr", "--learning-rate", type=float, default=0.1)
parser.add_argument("--batch", type=int, choices=[16, 32, 64])
parser.add_argument("--optimizer", choices=("sgd", "adam"))
parser.add_argument("--amp", action="store_true")
parser.add_argument("--betas", type=float, nargs=2)
parser.add_argument("--sizes", type=int, nargs="+")
parser.add_argument("--name")
given = parser.parse_args()
"""

#: Part of the error message -> search space that the script `PLAIN` can't use.
REFUSED: dict[str, dict[str, Any]] = {
    "--learning_rates is not one of its options, which are --lr, --learning-rate": {"learning_rates": 0.1},
    "did you mean --learning-rate?": {"learnin_rate": 0.1},
    "--batch: 0.5 must be of type int (line 5)": {"batch": pl.choice(32, 0.5)},
    "must be of type int": {"batch": pl.uniform(16, 64)},
    "--batch: 48 is not one of its choices 16, 32, 64 (line 5)": {"batch": pl.qnormal(48, 0.01, 16)},
    "--optimizer: rmsprop is not one of its choices sgd, adam (line 6)": {"optimizer": pl.choice("sgd", "rmsprop")},
    "--amp: it is a switch, which takes no value but true and false (line 7)": {"amp": pl.choice(1, False)},
    "--betas: it takes 2 values (line 8)": {"betas": pl.uniform(0, 1)},
    "--lr: high must be of type float": {"a": pl.choice({"--lr": pl.choice("high", "low")}, {"--batch": 16})},
    "[0.1, 1] must be of type float (line 4); to try one at a time, give choice()": {"lr": [0.1, 1]},
    "x must be of type int": {"sizes": pl.choice([1, "x"], 3)},
}

#: Variants of the script `PLAIN` whose options the check can't know completely. For them it reports no unknown option.
SILENT = {
    "another parser": "import click\n" + PLAIN,
    "known arguments alone": PLAIN.replace("parse_args()", "parse_known_args()"),
    "names that are made": PLAIN.replace("given =", "for n in ('x', 'y'): parser.add_argument('--' + n)\ngiven ="),
    "an option of another module": PLAIN.replace("given =", "import os\nos.fspath(parser) if 0 else None\ngiven ="),
    "two parsers": PLAIN + "\nother = argparse.ArgumentParser()",
    "a parent": "import argparse\nup = argparse.ArgumentParser(add_help=False)\nup.add_argument('--x')\n"
    "print(argparse.ArgumentParser(parents=[up]).parse_args())",
    "its own words": PLAIN.replace("parse_args()", "parse_args([])"),
    "changed words": "import sys\nsys.argv = sys.argv[:1]\n" + PLAIN,
    "removed words": "import sys\ndel sys.argv[1:]\n" + PLAIN,
    "a class of its own": PLAIN.replace(
        "parser = argparse.ArgumentParser",
        "class Own(argparse.ArgumentParser):\n"
        "    def parse_args(self, *a): return super().parse_known_args(*a)\nparser = Own",
    ),
    "the rest": PLAIN.replace("given =", "parser.add_argument('rest', nargs=argparse.REMAINDER)\ngiven ="),
    "a method by its name": PLAIN.replace("given =", "getattr(parser, 'add_argument')('--x')\ngiven ="),
    "an alias of the method": PLAIN.replace("given =", "add = parser.add_argument\nadd('--x')\ngiven ="),
    "a part of a name": PLAIN.replace("--name", "--xyz"),
    "no parser": "import sys",
    "no Python": "def (",
    "a function of a module": PLAIN.replace(
        "given =", "import functools\nfunctools.partial(parser.add_argument, '--x')()\ngiven ="
    ),
    "in a list": PLAIN.replace("given =", "for p in [parser]: p.add_argument('--x')\ngiven ="),
}

#: Other ways to write the script `PLAIN`. The check knows all options of these scripts.
KNOWN = {
    "a function that parses": (
        "import argparse as a\ndef given():\n  p = a.ArgumentParser()\n  p.add_argument('--lr', type=float)\n"
        "  return p.parse_args()\nif __name__ == '__main__': given()"
    ),
    "a function that makes it": (
        "from argparse import ArgumentParser as P\ndef make():\n  p = P()\n  p.add_argument('--lr', type=float)\n"
        "  return p\nif __name__ == '__main__': make().parse_args()"
    ),
    "a function that adds": (
        "import argparse\ndef more(to, n=1):\n  g = to.add_argument_group('x')\n  g.add_argument('--lr', type=float)\n"
        "parser = argparse.ArgumentParser()\nmore(n=2, to=parser)\nparser.parse_args()"
    ),
    "a main with words": (
        "import argparse, sys\ndef main(argv=None):\n  parser = argparse.ArgumentParser()\n"
        "  parser.add_argument('--lr', type=float)\n  parser.parse_args(argv)\n"
        "if __name__ == '__main__':\n  print(sys.argv[0])\n  main(sys.argv[1:])"
    ),
    "an attribute": (
        "import argparse\nclass Own:\n  def __init__(self):\n    self.parser = argparse.ArgumentParser()\n"
        "    self.parser.add_argument('--lr', type=float)\n    self.parser.epilog = 'x'\n"
        "  def go(self):\n    return self.parser.parse_args()\nOwn().go()"
    ),
    "a subcommand": (
        "import argparse\nparser = argparse.ArgumentParser()\nverbs = parser.add_subparsers()\n"
        "for_train = verbs.add_parser('train')\nfor_train.add_argument('--lr', type=float)\n"
        "for_test = verbs.add_parser('test')\nfor_test.add_argument('--lr', type=str)\nparser.parse_args()"
    ),
}

#: Parser -> (its smallest script, the words that the script gets for lr=0.1 and sizes=[1, 2]; None if that is uncertain).
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


def takes(script: Path, space: Space, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether argparse itself takes a few points of the space."""
    for quantile in (0.1, 0.5, 0.9):
        values = space.values(space.draw(lambda d, q=quantile: d.expression.raw_at(q)))  # type: ignore[misc]
        monkeypatch.setattr(sys, "argv", [str(script), *words(values)])
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit:
            return False
    return True


def complaint(
    space: dict[str, Any], script: Path, switches: tuple[str, ...] = (), given: tuple[str, ...] | None = None
) -> str:
    try:
        check(Space(space), script, switches, given)
    except SweepError as error:
        return str(error)
    return ""


@pytest.mark.promise("space-script-s-argparse-will")
def test_parameter_that_the_argparse_script_would_reject_is_reported_with_name_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLAIN)
    for said, space in REFUSED.items():
        assert said in complaint(space, script), said
        assert not takes(script, Space(space), monkeypatch), said
    fits = {
        "--lr": pl.loguniform(1e-6, 1),
        "batch": pl.choice(16, 32, None),
        "optim": pl.choice("sgd", "adam"),  # argparse completes an abbreviated name
        "sizes": pl.randint(1, 9),
        "name": pl.choice(1, 0.5, "-x", "a b", "-1e-05"),
    }
    assert complaint(fits, script) == ""
    assert takes(script, Space(fits), monkeypatch)
    several = complaint({"lrr": 1, "batch": 1.5}, script)
    assert "the space does not fit train.py" in several
    assert "--lrr" in several
    assert "--batch" in several


SWITCHES = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--amp", action="store_true")
parser.add_argument("--no-bias", dest="bias", action="store_false")
parser.add_argument("-n", "--nesterov", action=argparse.BooleanOptionalAction)
parser.add_argument("--old", type=bool)
parser.add_argument("--tuned", type=str)
parser.add_argument("files", nargs="*")
given = parser.parse_args()
"""


@pytest.mark.promise("switch-script-s-tuned-like")
def test_boolean_parameters_turn_switches_of_the_script_on_and_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SWITCHES)
    either = pl.choice(True, False)
    space = Space({"amp": either, "--no-bias": either, "a": pl.choice({"--nesterov": either}, {}), "tuned": either})
    switches = check(space, script)
    assert switches == ("--amp", "--no-bias", "--nesterov/--no-nesterov")

    def parsed(**values: object) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", [str(script), *words(values, switches), "a", "b"])
        found = vars(runpy.run_path(str(script), run_name="__main__")["given"])
        assert found.pop("files") == ["a", "b"]
        return {name: found[name] for name in ("amp", "bias", "nesterov", "tuned")}

    assert parsed(**{"amp": True, "--no-bias": True, "--nesterov": True, "tuned": True}) == {
        **{"amp": True, "bias": False, "nesterov": True, "tuned": "True"}
    }
    assert parsed(**{"amp": False, "--no-bias": False, "--nesterov": False}) == {
        **{"amp": False, "bias": True, "nesterov": False, "tuned": None}
    }
    assert parsed(amp=None)["amp"] is False
    # A space may have a switch's short name, the name that turns it off, or a constant value.
    assert check(Space({"-n": either, "amp": True, "no-bias": None}), script) == ("-n/--no-nesterov", "--amp")
    assert check(Space({"no-nesterov": either}), script) == ("--no-nesterov/--nesterov",)
    # Switches that users name stay, even if the check knows nothing about the script.
    assert check(space, script, ("--amp/--full",))[0] == "--amp/--full"
    assert "--tuned takes a value; it is not a switch (line 8)" in complaint({"tuned": either}, script, ("--tuned",))
    assert "--old: its type is bool, to which every word is true, so False would be (line 7)" in complaint(
        {"old": either}, script
    )
    assert complaint({"old": pl.choice("yes", "")}, script) == ""
    script.write_text("import click")
    assert check(space, script, ("--amp",)) == ("--amp",)


NEEDS = """
import argparse
def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, required=True)
    group = parser.add_argument_group("data")
    group.add_argument("-d", "--data", required=True)
    parser.add_argument("--epochs", type=int, required=MAYBE)
    if BIG:
        parser.add_argument("--size", required=True)
    more(parser)
    parser.parse_args()
def more(parser):
    parser.add_argument("--more", required=True)
BIG = MAYBE = False
if __name__ == "__main__":
    main()
"""


@pytest.mark.promise("space-script-s-argparse-will")
def test_argparse_check_reports_missing_and_unknown_arguments_of_the_job_and_the_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(NEEDS.replace("    more(parser)\n", ""))
    space = {"lr": pl.loguniform(1e-4, 1)}

    def said(*given: str, space: dict[str, Any] = space) -> str:
        monkeypatch.setattr(sys, "argv", [str(script), *given, *words(dict.fromkeys(space, 1))])
        text = complaint(space, script, given=given)
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit:
            assert text
        else:
            assert not text
        return text

    assert "--data is required (line 7), and neither the space nor the job gives it" in said()
    assert "--lr is required (line 5)" in said("--data", "x", space={"epochs": 1})
    wrong = said("--data=x", "--epoch", "2", "--foo", "3")
    assert (
        "train.py, by the options that it declares: --foo, which the job gives it, is not one of its options" in wrong
    )
    for given in (("--data", "x"), ("--dat=x",), ("-d", "x"), ("-dx", "--epochs", "3")):
        assert said(*given) == "", given
    # Nothing is reported if only a part of the script's arguments is known, or if the script may not need the argument.
    assert complaint(space, script) == ""
    script.write_text(NEEDS.replace("    parser.add_argument", "    if 1: return\n    parser.add_argument", 1))
    assert complaint(space, script, given=()) == ""
    script.write_text(NEEDS.replace("    more(parser)", "    parser.add_subparsers().add_parser('run')"))
    assert complaint(space, script, given=()) == ""
    assert complaint(space, script, given=("--", "--foo")) == ""
    for way in ("    if BIG: parser.parse_args()", "    try: parser.parse_args()\n    except SystemExit: pass"):
        script.write_text(NEEDS.replace("    parser.parse_args()", way).replace("    more(parser)\n", ""))
        assert complaint(space, script, given=()) == "", way
    # The script parses the arguments at its end, with a parser that a function returns.
    made = NEEDS.replace("    parser.parse_args()", "    return parser").replace(
        "    main()", "    given = main().parse_args()"
    )
    script.write_text(made)
    assert "--data is required" in complaint(space, script, given=())


@pytest.mark.promise("space-script-s-argparse-will")
@pytest.mark.parametrize("kind", SILENT)
def test_scripts_whose_arguments_can_not_be_determined_are_not_reported(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SILENT[kind])
    assert complaint({"x": pl.uniform(0, 1)}, script) == ""


@pytest.mark.promise("space-script-s-argparse-will")
@pytest.mark.parametrize("kind", KNOWN)
def test_misspelled_argument_is_detected_however_the_script_builds_its_parser(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    script = tmp_path / "train.py"
    script.write_text(KNOWN[kind])
    assert "--lrs is not one of its options" in complaint({"lrs": 0.1}, script)
    assert not takes(script, Space({"lrs": 0.1}), monkeypatch)
    # Two subcommands may have different options of the same name.
    assert ("must be of type float" in complaint({"lr": "high"}, script)) == (kind != "a subcommand")
    assert complaint({"lr": 0.1}, script) == ""


@pytest.mark.parametrize(
    "line",
    [
        "parser.add_argument('--x', type=lambda text: text)",
        "parser.add_argument('--x', type=float2, choices=[1])",
        "parser.add_argument('--x', **{})",
        "parser.add_argument('--x', action=argparse.Action)",
        "parser.add_argument('--x', type=int).type = str",
        "parser.add_argument('--x', choices=KINDS)",
        "parser.add_argument('--x', nargs=COUNT, type=int)",
        "def int(text): return text\nparser.add_argument('--x', type=int)",
        "parser.add_argument('word')\nparser.add_argument('--x', action='store_true')",
        "parser.register('type', int, str)\nparser.add_argument('--x', type=int)",
    ],
)
def test_values_for_arguments_of_unknown_type_are_not_reported(line: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import argparse\nparser = argparse.ArgumentParser()\n{line}\nparser.parse_args()\n")
    assert complaint({"x": pl.choice("a", "b")}, script) == ""


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.proof) for part in (1, 2, 3))])
def test_argparse_check_raises_no_error_for_any_example_or_library_script(part: int) -> None:
    """For every script the check returns a message or none, and never fails."""
    top = Path(__file__).parents[3]
    scripts = sorted([*(top / "examples").rglob("*.py"), *Path(runpy.__file__).parent.glob("*.py")])
    for script in scripts[part::4]:
        complaint({"x": 1}, script)


def found(tmp_path: Path, script: str, space: dict[str, Any], pass_as: str = "arguments") -> list[str]:
    (tmp_path / "train.py").write_text(dedent(script))
    (tmp_path / "configurator.py").write_text(dedent(SCRIPTS["by hand, with dashes"][0]))
    spec = SweepSpec(space=Space(space), metric="loss", goal="minimize", seed=1, pass_as=pass_as)
    checked = check_points(make_job(), spec, tmp_path)
    values = checked.space.values(checked.space.draw(lambda dimension: dimension.expression.raw_at(0.5)))
    return list(job_of(make_job(), values, checked.pass_as, tmp_path, checked.switches).arguments)


@pytest.mark.promise("sweep-gives-script-values-form")
@pytest.mark.parametrize("name", SCRIPTS)
def test_sweep_values_become_arguments_in_the_form_that_the_parser_of_the_script_accepts(
    tmp_path: Path, name: str
) -> None:
    script, words = SCRIPTS[name]
    space = {"lr": pl.choice(0.1), "sizes": pl.choice([[1, 2]])}
    assert found(tmp_path, script, space) == (words or ["--lr", "0.1", "--sizes", "[1, 2]"])
    if words is None:
        assert certain_way(tmp_path / "train.py") is None


#: Parser -> (a script with a list and switches, its words, the values that it parses).
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
def test_list_and_boolean_values_are_passed_in_the_form_of_the_argument_library_of_the_script(
    tmp_path: Path, name: str
) -> None:
    script, words = LISTS[name]
    space = {"size": pl.choice([[1, 2]]), "shout": pl.choice(True), "amp": pl.choice(False)}
    assert found(tmp_path, script, space) == words
    if find_spec(name.partition("'")[0]) is not None:
        argv = [sys.executable, tmp_path / "train.py", *words]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert (done.stdout, done.stderr) == ("[1, 2] True False\n", "")


def test_click_flag_with_default_true_is_not_a_switch(tmp_path: Path) -> None:
    # Versions of click differ in what `--amp` does to this flag.
    script = "import click\n@click.command()\n@click.option('--amp', is_flag=True, default=True)\ndef main(amp): ..."
    assert found(tmp_path, script, {"amp": pl.choice(False)}) == ["--amp", "False"]


def test_boolean_switches_of_a_tyro_script_are_detected(tmp_path: Path) -> None:
    script = SCRIPTS["tyro"][0]
    assert found(tmp_path, script, {"amp": pl.choice(False), "model": {"amp": pl.choice(False)}}) == [
        "--no-amp",
        "--model.no-amp",
    ]


@pytest.mark.promise("sweep-gives-script-values-form")
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
def test_argument_form_set_by_the_user_overrides_the_detected_one(tmp_path: Path, form: str, words: list[str]) -> None:
    assert found(tmp_path, "import fire", {"lr": pl.choice(-0.5), "sizes": pl.choice([[1, 2]])}, form) == words
