"""Spaces held against scripts. What is refused here argparse refuses as well, and what it takes is never refused."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import paceline as pl
from paceline.errors import SweepError
from paceline.sweeps.fit.fit import check
from paceline.sweeps.points import words
from paceline.sweeps.space import Space

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

#: What is refused of the plain script, with what is said.
REFUSED: dict[str, dict[str, Any]] = {
    "--learning_rates is none of its options, which are --lr, --learning-rate": {"learning_rates": 0.1},
    "did you mean --learning-rate?": {"learnin_rate": 0.1},
    "--batch: 0.5 is no int, which is its type (line 5)": {"batch": pl.choice(32, 0.5)},
    "is no int": {"batch": pl.uniform(16, 64)},
    "--batch: 48 is none of its choices 16, 32, 64 (line 5)": {"batch": pl.qnormal(48, 0.01, 16)},
    "--optimizer: rmsprop is none of its choices sgd, adam (line 6)": {"optimizer": pl.choice("sgd", "rmsprop")},
    "--amp: it is a switch, which takes no value but true and false (line 7)": {"amp": pl.choice(1, False)},
    "--betas: it takes 2 values (line 8)": {"betas": pl.uniform(0, 1)},
    "--lr: high is no float": {"a": pl.choice({"--lr": pl.choice("high", "low")}, {"--batch": 16})},
    "[0.1, 1] is no float, which is its type (line 4); to try one at a time, give choice()": {"lr": [0.1, 1]},
    "x is no int": {"sizes": pl.choice([1, "x"], 3)},
}

#: What a script may be like of which nothing can be known, or not this: for an option that it seems not to have.
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

#: Ways to write the plain script of which everything is known.
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


def test_what_does_not_fit_is_told_with_its_name_and_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLAIN)
    for said, space in REFUSED.items():
        assert said in complaint(space, script), said
        assert not takes(script, Space(space), monkeypatch), said
    fits = {
        "--lr": pl.loguniform(1e-6, 1),
        "batch": pl.choice(16, 32, None),
        "optim": pl.choice("sgd", "adam"),  # argparse completes it
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


def test_switches_of_the_script_are_turned_on_and_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    # By its short name, by the name that turns it off, and constants.
    assert check(Space({"-n": either, "amp": True, "no-bias": None}), script) == ("-n/--no-nesterov", "--amp")
    assert check(Space({"no-nesterov": either}), script) == ("--no-nesterov/--nesterov",)
    # What the user has said stays, also where nothing is known of the script.
    assert check(space, script, ("--amp/--full",))[0] == "--amp/--full"
    assert "--tuned takes a value; it is no switch (line 8)" in complaint({"tuned": either}, script, ("--tuned",))
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


def test_what_the_job_gives_beside_the_space_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert "train.py, by the options that it declares: --foo, which the job gives it, is none of its options" in wrong
    for given in (("--data", "x"), ("--dat=x",), ("-d", "x"), ("-dx", "--epochs", "3")):
        assert said(*given) == "", given
    # Where it is but a part of what the script is given, and where it may be that it is not needed.
    assert complaint(space, script) == ""
    script.write_text(NEEDS.replace("    parser.add_argument", "    if 1: return\n    parser.add_argument", 1))
    assert complaint(space, script, given=()) == ""
    script.write_text(NEEDS.replace("    more(parser)", "    parser.add_subparsers().add_parser('run')"))
    assert complaint(space, script, given=()) == ""
    assert complaint(space, script, given=("--", "--foo")) == ""
    for way in ("    if BIG: parser.parse_args()", "    try: parser.parse_args()\n    except SystemExit: pass"):
        script.write_text(NEEDS.replace("    parser.parse_args()", way).replace("    more(parser)\n", ""))
        assert complaint(space, script, given=()) == "", way
    # Read where the script begins, of a parser that a function has made.
    made = NEEDS.replace("    parser.parse_args()", "    return parser").replace(
        "    main()", "    given = main().parse_args()"
    )
    script.write_text(made)
    assert "--data is required" in complaint(space, script, given=())


@pytest.mark.parametrize("kind", SILENT)
def test_nothing_is_said_of_what_can_not_be_known(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SILENT[kind])
    assert complaint({"x": pl.uniform(0, 1)}, script) == ""


@pytest.mark.parametrize("kind", KNOWN)
def test_a_parser_is_followed_through_the_script(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    script = tmp_path / "train.py"
    script.write_text(KNOWN[kind])
    assert "--lrs is none of its options" in complaint({"lrs": 0.1}, script)
    assert not takes(script, Space({"lrs": 0.1}), monkeypatch)
    # Two subcommands may mean different things by one name.
    assert ("is no float" in complaint({"lr": "high"}, script)) == (kind != "a subcommand")
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
def test_values_are_not_judged_where_their_type_is_not_known(line: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import argparse\nparser = argparse.ArgumentParser()\n{line}\nparser.parse_args()\n")
    assert complaint({"x": pl.choice("a", "b")}, script) == ""


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.proof) for part in (1, 2, 3))])
def test_the_scripts_of_the_examples_and_of_the_standard_library_cause_no_wrong_alarm(part: int) -> None:
    """Whatever a reader of scripts meets, it says nothing or something, and never fails."""
    top = Path(__file__).parents[3]
    scripts = sorted([*(top / "examples").rglob("*.py"), *Path(runpy.__file__).parent.glob("*.py")])
    for script in scripts[part::4]:
        complaint({"x": 1}, script)
