"""The verbs are listed from a table, and each is loaded when it is called."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import pytest

from paceline.cli.options import VerbOption
from paceline.cli.parser import VerbGroup, app, first_sentence
from paceline.cli.run_options import RUN
from paceline.cli.sweep_options import SWEEP
from paceline.cli.verbs import SECTIONS, VERBS
from tests.cli.conftest import Cli


def modules_after(cli: Cli, *words: str) -> set[str]:
    """The modules that `paceline WORDS` has loaded when it ends."""
    # `paceline run` ends with `os._exit`, other commands end normally. Print the loaded modules in both cases.
    code = (
        "import atexit, os, sys; end = os._exit; tell = lambda: print(*sys.modules, file=sys.stderr, flush=True); "
        "atexit.register(tell); os._exit = lambda code: (tell(), end(code))"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; from paceline.cli import main; main()", *words],
        cwd=cli.folder,
        env=cli.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stderr.splitlines()[-1].split())


def of_verbs(modules: set[str]) -> set[str]:
    return {f"paceline.cli.{place.partition('.')[0]}" for place, _ in VERBS.values()} & modules


@pytest.mark.parametrize("verb", VERBS)
def test_text_of_each_command_in_the_command_table_equals_its_help(verb: str) -> None:
    assert VERBS[verb][1] == first_sentence(inspect.cleandoc(app.load(verb).help or ""))


def test_version_option_alone_imports_no_command_line_parser(cli: Cli) -> None:
    modules = modules_after(cli, "--version")
    assert not modules & {"click", "rich", "logging", "typing", "re", "importlib.metadata"}
    assert of_verbs(modules) == set()
    # If `--version` is combined with a command, the parser prints the same version text.
    assert cli("--version", "status").stdout == cli("--version").stdout


@pytest.mark.promise("help-verb-load-other-verb")
def test_help_list_and_run_import_no_modules_of_other_commands(cli: Cli) -> None:
    assert of_verbs(modules_after(cli, "--help")) == set()
    modules = modules_after(cli, "list")
    assert of_verbs(modules) == {"paceline.cli.read"}
    modules = modules_after(cli, "run", "--help")
    assert of_verbs(modules) == {"paceline.cli.quick"}
    # These modules take long to import, and only other commands need them.
    assert not modules & {"rich", "yaml", "asyncio", "importlib.metadata", "paceline.environments.store"}


def test_help_has_sections_and_a_line_for_each_command(cli: Cli) -> None:
    text = cli("--help").stdout
    for title in SECTIONS.values():
        assert f"\n{title}:\n" in text
    width = max(map(len, VERBS))
    for name, (_, words) in VERBS.items():
        assert f"\n  {name:<{width}}  {first_sentence(words)}\n" in text


GROUPS = [name for name, (place, _) in VERBS.items() if "." not in place]


@pytest.mark.promise("help-sections-cuts-description-fits")
@pytest.mark.parametrize("name", GROUPS)
def test_help_of_a_command_group_has_a_line_for_each_command(cli: Cli, name: str) -> None:
    text = cli(name, "--help").stdout
    group = app.load(name)
    assert isinstance(group, VerbGroup)
    width = max(map(len, group.commands))
    for verb, command in group.commands.items():
        assert f"\n  {verb:<{width}}  {first_sentence(command.help or '')}\n" in text


@pytest.mark.promise("help-sections-cuts-description-fits")
@pytest.mark.parametrize(("verb", "options"), [("run", RUN), ("submit", RUN), ("sweep run", SWEEP)])
def test_help_of_a_command_with_many_options_has_sections(cli: Cli, verb: str, options: tuple[VerbOption, ...]) -> None:
    text = cli(*verb.split(), "--help").stdout
    titles = [option.section for option in options if option.section]
    assert re.findall(r"^(\S.*):$", text, re.M) == ["Example", "Arguments", *titles]
    # Short sections help readers to find an option. No section may have more than a third of the options.
    sizes = [len(re.findall(r"^  -", part, re.M)) for part in re.split(r"^\S.*:$", text, flags=re.M)]
    assert max(sizes) <= sum(sizes) / 3


@pytest.mark.promise("help-sections-cuts-description-fits")
@pytest.mark.parametrize("words", [("run", "--help"), ("--help",), ("service", "--help"), ("list", "--help")])
def test_help_fits_into_a_narrow_terminal(cli: Cli, words: tuple[str, ...]) -> None:
    wide = [line for line in cli(*words, env={"COLUMNS": "40"}).stdout.splitlines() if len(line) > 40]
    # Only a line with a single long option may be wider than the terminal, because an option can't be split.
    assert [line for line in wide if not line.lstrip().startswith("--")] == []


@pytest.mark.parametrize("group", GROUPS)
def test_help_of_a_command_group_names_only_existing_commands(cli: Cli, group: str) -> None:
    known = set(re.findall(r"^  (\w[\w-]*) ", cli(group, "--help").stdout.partition("Commands:")[2], re.M))
    listed = re.match(r"(?:\w+, )+\w+ and \w+", VERBS[group][1])
    named = set(re.findall(r"\w+", listed[0].lower())) - {"and"} if listed else set()
    assert named <= known | {"copy", "examine"}
