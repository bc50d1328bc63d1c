"""init, examples, docs: the examples and the pages that come with the package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.cli import guide
from paceline.cli.parser import VerbCommand, VerbGroup, app
from paceline.cli.verb_help import EXAMPLES, TOPICS, installed, topic_of
from paceline.cli.verbs import VERBS
from tests.cli.conftest import Cli
from tests.cli.terminal import Terminal


def verbs() -> list[str]:
    """Return the words of every verb, such as "sweep run"."""
    found = []
    for name in VERBS:
        verb = app.load(name)
        found += [f"{name} {below}" for below in verb.commands] if isinstance(verb, VerbGroup) else [name]
    return found


def test_init_writes_a_script_and_job_file_that_run_and_a_valid_sweep_file(cli: Cli) -> None:
    done = cli("init", "first")
    assert done.stdout == "4 files written to first: .gitignore, job.yaml, sweep.yaml, train.py\n"
    assert "cd first && paceline run train.py -- --rate 0.3" in done.stderr
    first = cli.folder / "first"
    assert "loss 0.0" in cli("run", "train.py", "--", "--rate", "0.3", cwd=first).stdout
    assert "loss 0.0" in cli("run", "job.yaml", cwd=first).stdout
    assert len(json.loads(cli("sweep", "run", "sweep.yaml", "--dry-run", "--json", cwd=first).stdout)["points"]) == 8


def test_init_replaces_no_file(cli: Cli) -> None:
    (cli.folder / "train.py").write_text("mine")
    done = cli("init", code=2)
    assert done.stderr == (
        "paceline: error: 'train.py' exists already, and stays unchanged. Name an empty or new folder.\n"
    )
    assert [path.name for path in cli.folder.iterdir() if path.name != "state"] == ["train.py"]


def test_examples_are_listed_and_copied(cli: Cli) -> None:
    listed = cli.json("examples")
    assert {"start", "sweep", "ddp"} <= {one["name"] for one in listed}
    assert all(one["about"] for one in listed)
    assert cli.json("examples", "sweep", "--to", "mine") == {
        "folder": "mine",
        "files": ["submit.py", "sweep.yaml", "train.py"],
    }
    assert (cli.folder / "mine" / "sweep.yaml").is_file()
    assert "pip install" not in cli("examples", "faulty").stderr
    done = cli("examples", "swep", code=2)
    assert "there is no example 'swep'. Did you mean 'sweep'?" in done.stderr


def test_packages_imported_by_an_example_but_not_installed_are_listed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import os, cv2.gone, horovod.torch, helper\nfrom no_such_package import a\n")
    (tmp_path / "helper.py").write_text("from . import x\n")
    assert guide._not_installed(tmp_path, ["train.py", "helper.py"]) == ["no_such_package", "opencv-python-headless"]


def test_docs_lists_and_prints_pages_and_headings(cli: Cli) -> None:
    listed = cli("docs").stdout
    assert "\nsweeps " in listed
    assert ".es" not in listed
    page = cli("docs", "sweeps").stdout
    assert page.startswith("# ")
    assert "<!--" not in page
    assert cli("docs", "sweep").stdout.startswith("## sweep\n")
    logs = cli("docs", "logs").stdout
    assert logs.startswith("## logs\n")
    assert "--tail" in logs
    assert "## metrics" not in logs
    assert cli("docs", "command-line#exit-codes").stdout.startswith("## Exit codes")


@pytest.mark.parametrize(
    ("topic", "meant"), [("sweps", "'sweeps'"), ("exit-code", "'exit-codes'"), ("runs#restarst", "")]
)
def test_unknown_documentation_topic_suggests_the_nearest_ones(cli: Cli, topic: str, meant: str) -> None:
    done = cli("docs", topic, code=2)
    assert f"there is no page or heading {topic!r}." in done.stderr
    assert meant in done.stderr
    assert "`paceline docs` lists the pages." in done.stderr


def test_docs_opens_a_pager_on_a_terminal(cli: Cli) -> None:
    cli.environment["PAGER"] = "cat"
    terminal = Terminal(cli, "docs", "logs")
    try:
        assert terminal.exit_code() == 0
        assert "--tail" in terminal.text
        assert "## logs" not in terminal.text
    finally:
        terminal.close()


def test_each_command_has_an_example_that_parses() -> None:
    assert set(EXAMPLES) - {""} == set(verbs())
    for verb, text in EXAMPLES.items():
        assert f"paceline {verb}" in text
        assert len(text) <= 76  # the example fits on one line


def test_each_command_has_an_existing_documentation_topic(cli: Cli) -> None:
    assert set(TOPICS) <= set(VERBS)
    for topic in sorted({topic_of(verb) for verb in VERBS}):
        assert cli("docs", topic).stdout.startswith("#"), topic


@pytest.mark.parametrize("verb", [verb for verb in EXAMPLES if verb])
def test_help_has_usage_example_options_and_page(cli: Cli, verb: str) -> None:
    text = cli(*verb.split(), "--help").stdout
    assert max(map(len, text.splitlines())) <= 80
    parts = [f"Usage: paceline {verb}", "\nExample:\n", "--help", f"\nMore: paceline docs {topic_of(verb)}\n"]
    places = [text.find(part) for part in parts]
    assert -1 not in places, text
    assert places == sorted(places)


def test_help_examples_use_only_options_of_their_command() -> None:
    for verb, text in EXAMPLES.items():
        command = app.load(verb.split()[0]) if verb else None
        if isinstance(command, VerbGroup):
            command = command.commands[verb.split()[1]]
        if isinstance(command, VerbCommand):
            known = {word for option in command.params for word in (*option.opts, *option.secondary_opts)}
            before = text.partition(" -- ")[0].split()
            assert {word for word in before if word.startswith("-") and word.strip("-")} <= known, text


def test_docs_command_of_a_checkout_reads_the_docs_folder_beside_its_source() -> None:
    assert installed("docs") == Path(__file__).parents[2] / "docs"
