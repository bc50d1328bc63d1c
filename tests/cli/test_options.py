"""Tables of options: the values that the parser makes, and the options that verbs accept."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from paceline.cli import run_options
from paceline.cli.options import JSON, OPTIONS_OF, Duration, VerbOption, takes
from paceline.cli.parser import VerbCommand, VerbGroup, app
from paceline.cli.verbs import VERBS
from paceline.errors import UserError
from paceline.job.job import BACKENDS, GPU_VISIBILITIES

SOME = (
    VerbOption("script", "What runs.", type=Path),
    VerbOption("rest", "Its arguments.", type=list),
    VerbOption("-j --nodes", "How many.", "N", int, least=1),
    VerbOption("--gpu/--no-gpu", "With GPUs.", type=bool),
    VerbOption("--tag", "A tag.", "TAG", list),
    VerbOption("--wait", "How long.", type=Duration(unit="m", least=2.0), name="wait_s", default=60.0),
    VerbOption("--name", "A name."),
    VerbOption("--sample", "A sample.", may_be_empty=True),
    JSON,
)


def read(*words: str) -> dict[str, Any]:
    """Return the values that a verb with the options `SOME` gets for these words."""
    taken: dict[str, Any] = {}

    @takes(*SOME)
    def verb(**given: Any) -> None:
        taken.update(given)

    VerbCommand("verb", verb).main([*words], standalone_mode=False)
    return taken


def test_command_function_is_called_with_the_parsed_value_of_each_option_as_a_named_argument() -> None:
    nothing = {"script": None, "rest": [], "nodes": None, "gpu": None, "tag": [], "wait_s": 60.0, "name": None}
    assert read() == nothing | {"sample": None, "as_json": False}
    words = [
        "-j2",
        "--no-gpu",
        "--tag",
        "a",
        "--tag=b",
        "--wait",
        "3",
        "--json",
        "train.py",
        "--name",
        "x",
        "--",
        "--epochs",
        "5",
    ]
    assert read(*words) == {
        **{"script": Path("train.py"), "rest": ["--epochs", "5"], "nodes": 2, "gpu": False, "tag": ["a", "b"]},
        **{"wait_s": 180.0, "name": "x", "sample": None, "as_json": True},
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-j", "0"], "0 is not in the range x>=1"),
        (["--wait", "soon"], "'soon' is not a duration"),
        (["--wait", "1s"], "'1s' is too short; it has to be 2 s or more"),
        (["--nmae", "x"], "No such option.*--nmae"),
    ],
)
def test_invalid_option_value_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(click.UsageError, match=message):
        read(*words)


def test_empty_option_value_is_refused_unless_the_option_accepts_an_empty_text() -> None:
    with pytest.raises(UserError, match=r"--tag ' ' is empty\. Give a value"):
        read("--tag", "a", "--tag", " ")
    assert read("--sample", "")["sample"] == ""


def verbs() -> Iterator[tuple[str, Any]]:
    for name in VERBS:
        command = app.load(name)
        below = command.commands if isinstance(command, VerbGroup) else {"": command}
        yield from ((f"{name} {word}".strip(), each.callback) for word, each in below.items())


def test_parameters_and_types_of_each_command_function_equal_the_declared_options_of_its_command() -> None:
    texts = {str: "str", list: "list[str]", int: "int", float: "float", bool: "bool", Path: "Path"}
    for name, verb in verbs():
        parameters = inspect.signature(verb).parameters
        if [*parameters] == ["given"]:
            continue
        assert [*parameters] == [option.name for option in OPTIONS_OF.get(verb, ())], name
        for option in OPTIONS_OF.get(verb, ()):
            expected = texts.get(option.type) if isinstance(option.type, type) else None
            annotation = parameters[option.name].annotation
            if expected:
                may_be_none = option.default is None and not option.needed and option.type is not list
                assert annotation == (f"{expected} | None" if may_be_none else expected), (name, option.name)


def test_each_kind_of_shell_completion_that_an_option_declares_has_a_function() -> None:
    from paceline.cli.completing import _OFFERS

    offered = {option.complete for _, verb in verbs() for option in OPTIONS_OF.get(verb, ()) if option.complete}
    assert offered == {*_OFFERS}


def test_help_of_paceline_run_lists_all_valid_values_of_backend_and_gpu_visibility() -> None:
    table = {option.name: option for option in run_options.RUN}
    assert f"{', '.join(BACKENDS)}." in table["backend"].help
    assert table["gpu_visibility"].metavar == "|".join(GPU_VISIBILITIES)
