"""A command line is read by the table of options as the parser reads it, or left to the parser."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import typer
import typer.main

from paceline.cli import options, run_options
from paceline.job.job import BACKENDS, GPU_VISIBILITIES

#: click's own, which some versions of typer carry within.
_UsageError: Any = typer.BadParameter.__base__


@pytest.fixture(scope="module")
def parser() -> Callable[[list[str]], dict[str, Any] | None]:
    """What a verb with the options of `run` is given by the parser; None where it refuses the words."""
    taken: list[dict[str, Any]] = []
    app = typer.Typer(rich_markup_mode=None)

    def verb(**given: Any) -> int:
        taken.append(given)
        return 0

    app.command()(options.takes(*run_options.RUN)(verb))
    options.declare(verb)
    command: Any = typer.main.get_command(app)

    def parse(words: list[str]) -> dict[str, Any] | None:
        try:
            command(words, standalone_mode=False, prog_name="paceline")
        except _UsageError:
            return None
        return taken.pop()

    return parse


def plain(given: dict[str, Any]) -> dict[str, Any]:
    """A list of nothing is as good as nothing."""
    return {name: None if value == [] else value for name, value in given.items()}


def some_words(rng: random.Random) -> list[str]:
    words: list[str] = []
    values = ["x", "3", "2x4", "90s", "a=b", "train.py", "-", "-1", "", "a b", "--gpu", "1_0", "nan", "="]
    for _ in range(rng.randrange(6)):
        option = rng.choice(run_options.RUN)
        spelled = [word for word, _ in options._spelled(option)] or [rng.choice(values)]
        word = rng.choice([*spelled, *spelled, *spelled, "--", "-qd", "--no", "-qj2", *spelled])
        words += rng.choice([[word, rng.choice(values)], [word], [f"{word}={rng.choice(values)}"]])
    return words


def test_what_is_read_at_once_is_what_the_parser_reads(parser: Any) -> None:
    rng, read = random.Random(0), 0
    for _ in range(4000):
        words = some_words(rng)
        given = options.read(run_options.RUN, words)
        if given is not None:
            read += 1
            expected = parser(words)
            assert expected is not None, words
            assert plain(given) == plain(expected), words
    assert read > 500


def test_usual_command_lines_need_no_parser(parser: Any) -> None:
    for line in (
        "train.py",
        "train.py -- --epochs 5 -x",
        "-j 2x4 --backend gloo --gpu --no-gpu train.py a b",
        "-m pkg.train --env A=1 --env=B -q --tag t",
        "--max-duration=1h30m --grace 5 --max-restarts 3 --restart-on-exception train.py --json",
        "train.py -r a.txt --requirements b.txt --isolated --input d=/data --output o=lab:x",
    ):
        given = options.read(run_options.RUN, line.split())
        expected = parser(line.split())
        assert given is not None, line
        assert expected is not None, line
        assert plain(given) == plain(expected), line


@pytest.mark.parametrize(
    "line",
    ["--help", "-h", "train.py --epochs 5", "-qd", "-j", "-j2", "-j=2", "--max-restarts x", "--grace soon", "--gpu=1"],
)
def test_what_is_not_plainly_right_is_the_parsers(line: str) -> None:
    assert options.read(run_options.RUN, line.split()) is None


def test_what_is_needed_is_missed() -> None:
    assert options.read(run_options.RERUN, ["-q"]) is None
    given = options.read(run_options.RERUN, ["r_1", "-q"])
    assert given is not None
    assert (given["run_id"], given["quiet"], given["detach"]) == ("r_1", True, False)
    assert options.read(run_options.RERUN, ["r_1", "r_2"]) is None


def test_the_table_names_what_a_job_takes() -> None:
    table = {option.name: option for option in run_options.RUN}
    assert f"{', '.join(BACKENDS)}." in table["backend"].help
    assert table["gpu_visibility"].metavar == "|".join(GPU_VISIBILITIES)
