"""What the documentation says is so: its links lead somewhere, its commands run, its tables are those of the code."""

from __future__ import annotations

import json
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest

from paceline import Estimator, PyTorch, SKLearn, TensorFlow
from paceline.cli.parser import app
from paceline.cli.summary import details, summary
from paceline.cli.verbs import VERBS
from paceline.job.job import RANK_VARIABLES, Job
from paceline.job.plan import Command, Launch, Node, NodeSetup
from paceline.launchers import environment, get_launcher, mpi
from paceline.launchers.base import Launcher
from paceline.runs import states
from paceline.runs.failure import CAUSES, FailureReport
from paceline.runs.record import Attempt, RunRecord
from paceline.worker import ranks
from tests.cli.conftest import Cli
from tests.docs.kinds import stays
from tests.docs.pages import (
    DOCS,
    LINK,
    PAGES,
    README,
    ROOT,
    Block,
    anchors,
    blocks,
    code_words,
    first_column,
    links,
    prose,
    section,
    tables,
)
from tests.docs.printed import assert_printed
from tests.docs.reader import interrupted
from tests.engines import hosts
from tests.engines.conftest import require_engine
from tests.helpers import make_job, make_launch, make_record, make_run
from tests.sweeps.helpers import hide_matplotlib
from tests.warm import run_command

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ESTIMATORS = (Estimator, PyTorch, TensorFlow, SKLearn)
VARIABLES = DOCS / "worker-environment.md"
ESTIMATORS_PAGE = DOCS / "estimators.md"
COMMANDS = DOCS / "command-line.md"
RUNS = DOCS / "runs.md"
EXAMPLES = DOCS / "examples.md"
ALL_PAGES = DOCS / "all-pages.md"

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


# --- tests of links and names


def test_files_named_in_the_layers_section_of_contributing_exist() -> None:
    words = code_words(section(ROOT / "CONTRIBUTING.md", "The layers"))
    paths = [word for word in words if re.fullmatch(r"[\w/]+(/|\.py)", word)]
    assert paths
    places = (ROOT / "src" / "paceline", ROOT)
    assert [path for path in paths if not any((place / path).exists() for place in places)] == []


@by_page
def test_every_paceline_name_in_backticks_exists(page: Path) -> None:
    for word in code_words(page.read_text()):
        if re.fullmatch(r"paceline(\.[a-z]\w*)*(\.\w+)?", word) and not word.endswith((".toml", ".run")):
            try:
                pkgutil.resolve_name(word)
            except (ImportError, AttributeError) as error:
                raise AssertionError(f"{page.name}: {word}: {error}") from error


@by_page
def test_every_table_of_a_page_begins_with_a_heading_row(page: Path) -> None:
    """A blank line within a table ends it: the rows below are shown as text."""
    lines = ["", *page.read_text().splitlines(), ""]
    first = [at for at, line in enumerate(lines) if line.startswith("|") and not lines[at - 1].startswith("|")]
    assert [lines[at] for at in first if not re.fullmatch(r"\|[-:| ]+\|", lines[at + 1])] == []


@by_page
def test_every_link_in_the_docs_has_an_existing_target(page: Path) -> None:
    for link in links(page):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link}: there is no such file"
        assert not anchor or anchor in anchors(target), f"{link}: there is no such heading"


def test_list_of_all_pages_links_every_page_of_the_docs() -> None:
    linked = {(DOCS / link.partition("#")[0]).resolve() for link in links(ALL_PAGES)}
    # The list need not have these pages: the architecture page links the pages for contributors, and CONTRIBUTING.md
    # links the decisions.
    others = {page for page in PAGES if {"contributing", "decisions"} & {*page.parts} or page.parent == ROOT}
    assert not set(PAGES) - linked - {ALL_PAGES} - others


# --- tests of the README


def test_readme_has_at_most_8_kib() -> None:
    assert len(README.read_bytes()) <= 8192


def test_measured_figures_in_the_readme_equal_the_values_in_the_linked_benchmark_result_files() -> None:
    rows = [row for row in tables(section(README, "Measured"))[0] if "benchmarks/results/" in row[0]]
    assert len(rows) >= 4
    for what, *cells in rows:
        (link,) = LINK.findall(what)
        values = [value for value in json.loads((ROOT / link).read_text()).values() if isinstance(value, float)]
        for figure in re.findall(r"[\d.]+(?= (?:s|ms|tokens/s)\b)", " ".join(cells)):
            digits = len(figure.partition(".")[2])
            assert float(figure) in [round(value, digits) for value in values], f"{what}: {figure}"


# --- tests of commands


@by_page
def test_shell_commands_of_pages_are_valid(page: Path) -> None:
    """`make` and `pip` are not run: their targets and extras have to exist. Such a block has no other commands."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    variables = {name for line in re.findall(r"^export (.+)", makefile, re.MULTILINE) for name in line.split()}
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for block in blocks(page, "sh"):
        for line in block.text.splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["make"]:
                assert {word.partition("=")[0] for word in words[1:] if "=" in word} <= variables, line
                assert {word for word in words[1:] if "=" not in word} <= targets, line
            elif words[:2] == ["pip", "install"]:
                named = re.fullmatch(r"(?:paceline|\.)\[([a-z,]+)\]", words[-1])
                assert named, line
                assert set(named[1].split(",")) <= extras, line
            else:
                assert not words, f"{line}: a command with its output belongs into a `console` block, where it is run"


def is_elsewhere(text: str) -> bool:
    """Whether a block's command needs two SSH hosts."""
    return bool(re.search(r"\blab\b", text.splitlines()[0]))


COMMAND_BLOCKS = [block for page in (README, EXAMPLES) for block in blocks(page, "console")]
#: Text of a block -> the block. README.md and the page examples.md share some blocks, which need to run only once.
HERE = {block.text: block for block in COMMAND_BLOCKS if not is_elsewhere(block.text)}


@pytest.mark.promise("command-readme-works")
@pytest.mark.slow
@pytest.mark.parametrize("block", HERE.values(), ids=lambda block: block.text.splitlines()[0])
def test_documented_command_prints_the_output_shown_on_its_page(checkout: Path, block: Block) -> None:
    hide_matplotlib(checkout / ".paceline")  # the page shows sweeps but no PNG files, so skip the plots
    assert_prints_what_it_says(block)


#: This small script runs in place of the digits example, which another test trains. The example would load torch in
#: each of four workers.
MEETING = """
import os, socket, time
if "OMPI_COMM_WORLD_RANK" in os.environ:
    from mpi4py import MPI
    assert MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank) == 0 + 1 + 2 + 3
elif os.environ["RANK"] == "0":
    with socket.create_server(("", int(os.environ["MASTER_PORT"]))) as server:
        assert {server.accept()[0].recv(1) for _ in range(3)} == {b"1", b"2", b"3"}
else:
    while True:
        try:
            with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as first:
                first.sendall(os.environ["RANK"].encode())
            break
        except ConnectionError:
            time.sleep(0.1)
"""


@pytest.mark.promise("command-readme-works")
@pytest.mark.slow
@pytest.mark.parametrize("script", [MEETING, pytest.param(None, marks=pytest.mark.proof)], ids=["meeting", "digits"])
def test_documented_commands_that_need_two_ssh_hosts_print_the_shown_output(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, script: str | None
) -> None:
    lacks = hosts.missing()
    require_engine(f"hosts ({lacks})" if lacks else "hosts", not lacks)
    found = {block.text: block for block in COMMAND_BLOCKS if is_elsewhere(block.text)}
    assert len(found) >= 3
    if script is not None:
        (checkout / "examples" / "digits" / "train.py").write_text(script)
    with hosts.Hosts("lab", private=()).up(2) as lab:
        for name, value in lab.ssh_environment().items():
            monkeypatch.setenv(name, value)
        (checkout / "hosts.txt").write_text("".join(f"{name} slots=2\n" for name in lab.names))
        for block in found.values():
            assert_prints_what_it_says(block)


def assert_prints_what_it_says(block: Block) -> None:
    text = block.text
    first, *said = text.splitlines()
    assert first.startswith("$ "), "the command first"
    assert text.count("$ ") == 1, "one command a block"
    if stays(block):
        interrupted(first[2:], said, str(Path.cwd()), dict(os.environ))
        return
    done = subprocess.run(
        shlex.split(first[2:]), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == (1 if "Failed in" in text else 0), done.stdout
    assert_printed(said, done.stdout)


@pytest.mark.promise("readme-s-ten-lines-run")
@pytest.mark.slow
def test_ten_line_example_prints_the_output_on_its_page(checkout: Path) -> None:
    program, said = blocks(EXAMPLES, "python")[0].text, blocks(EXAMPLES, "text")[0].text
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_printed(said.splitlines(), done.stdout)


@pytest.mark.slow
def test_documented_parallelize_example_prints_the_shown_output_on_one_worker_and_on_two(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine, several threads of a process would wait for each other too long.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = blocks(EXAMPLES)
    (at,) = [number for number, block in enumerate(found) if "paceline.parallelize(" in block.text]
    (checkout / "example.py").write_text(found[at].text)
    for start in ([sys.executable], [sys.executable, "-m", "paceline", "run", "-j", "1x2", "--backend", "gloo"]):
        done = subprocess.run([*start, "example.py"], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        assert_printed(found[at + 1].text.splitlines(), re.sub(r"^\[rank 0\] ", "", done.stdout, flags=re.MULTILINE))


def test_comparison_of_command_output_ignores_numbers_and_ids_but_not_words() -> None:
    """Numbers and ids may differ, "..." stands for anything, and a state may be too short to be seen. Words may not."""
    printed = "-- Starting\n[rank 0] loss 0.25\n-- Completed in 1 min 2 s\nMore: paceline logs a_1700000000_0123abcd"
    said = ["-- Running", "...", "[rank 0] loss 0.5", "-- Completed in 3.1 s", "More: ... a_1800000000_ffffffff"]
    assert_printed(said, printed)
    with pytest.raises(AssertionError):
        assert_printed(["[rank 0] accuracy 0.5"], printed)


@by_page
def test_every_python_and_toml_block_of_a_page_has_valid_syntax(page: Path) -> None:
    for block in blocks(page, "python"):
        compile(block.text, str(page), "exec")
    for block in blocks(page, "toml"):
        tomllib.loads(block.text)


# --- tests of the worker's environment

LOOPBACK = (Node(node_rank=0, name="local-0", address="127.0.0.1", cores=8, interface="lo"),)

#: Variables of workers that have a default only if the network interface of the node is known.
INTERFACES = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}

LAUNCHES = {
    "one process": make_launch(make_job()),
    "on this machine": make_launch(make_job(), nodes=LOOPBACK),
    "one process with a backend": make_launch(make_job(distributed_backend="gloo"), nodes=LOOPBACK),
    "gloo": make_launch(make_job(node_count=2, process_count_per_node=2, distributed_backend="gloo")),
    "nccl": make_launch(
        make_job(node_count=2, process_count_per_node=2, distributed_backend="nccl", use_gpu=True), gpus=2
    ),
    "tensorflow": make_launch(make_job(node_count=2, distributed_backend="tensorflow")),
    "a time limit": make_launch(make_job(), ends_at=1.0),
    "its own environment, and data": make_launch(
        make_job(),
        prepared=(
            NodeSetup(
                python="/env/bin/python",
                variables={"VIRTUAL_ENV": "/env", "CONDA_PREFIX": "/env"},
                bin_dir="/env/bin",
                is_isolated=True,
                inputs={"<name>": "/data"},
            ),
        ),
    ),
    "elastic": make_launch(make_job(node_count=(1, 2), distributed_backend="gloo")),
    "replacement": make_launch(
        make_job(node_count=2, distributed_backend="gloo", max_restarts=1, on_failure="replace")
    ),
    "ps": make_launch(make_job(distributed_backend="ps", worker_count=2, parameter_server_count=1)),
}


def found_by_workers(launch: Launch) -> list[set[str]]:
    """For each worker of plain processes, the names that it finds because of Paceline."""
    commands = get_launcher(launch.job.launcher).commands(launch)
    return [names(environment.with_paths(command, launch, {})) for command in commands]


def names(command: Command) -> set[str]:
    return {*command.environment, *command.defaults}


def documented(heading: str, table: int | None = None) -> set[str]:
    text = section(VARIABLES, heading)
    rows = tables(text) if table is None else [tables(text)[table]]
    return {word for rows_of_one in rows for row in rows_of_one for word in code_words(row[0])}


@pytest.mark.promise("workers-find-documented-variables-others")
def test_workers_of_each_launcher_get_exactly_the_documented_environment_variables() -> None:
    found = {name: found_by_workers(launch) for name, launch in LAUNCHES.items()}
    everywhere = set.intersection(*(one for of_launch in found.values() for one in of_launch))
    somewhere = set.union(*(one for of_launch in found.values() for one in of_launch))

    launched = documented("Set by a launcher")
    assert somewhere == documented("Set for every worker") | launched | documented("Defaults")
    assert not launched & found["one process"][0]
    assert not launched & found["on this machine"][0]
    assert launched - set.intersection(*found["gloo"]) == INTERFACES
    assert documented("Set for every worker", 0) <= everywhere
    assert not documented("Set for every worker", 1) & everywhere


def test_documented_default_variables_equal_those_that_a_shell_can_override() -> None:
    commands = [
        command for launch in LAUNCHES.values() for command in get_launcher(launch.job.launcher).commands(launch)
    ]
    assert {name for command in commands for name in command.defaults} == documented("Defaults") | INTERFACES


@pytest.mark.promise("workers-find-documented-variables-others")
@pytest.mark.parametrize("node_count", [1, 2])
def test_workers_under_open_mpi_find_the_documented_variables(monkeypatch: pytest.MonkeyPatch, node_count: int) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    job = make_job(node_count=node_count, process_count_per_node=2, distributed_backend="mpi")
    found: set[str] = set()
    for version in ((4, 1), (5, 0)):
        monkeypatch.setattr(mpi, "find_open_mpi", lambda python, version=version: mpi.OpenMpi("mpirun", version))
        found |= under_open_mpi(make_launch(job))

    everywhere = documented("Set for every worker") | documented("Set by a launcher")
    assert documented("Set for every worker", 0) <= found
    assert found - everywhere - documented("Defaults") == documented("With Open MPI")


def under_open_mpi(launch: Launch) -> set[str]:
    """The names that the first worker finds, less those that mpirun itself sets."""
    [command] = get_launcher("mpi").commands(launch)
    command = environment.with_paths(command, launch, {})
    values = {**command.defaults, **command.environment}
    # The words between the first one and `=--` have the form: =--mpi =--set =NAME=VALUE ... =--
    words = list(takewhile(lambda word: word != "=--", command.argv))
    for option, word in pairwise(words):
        if option == "=--set":
            name, _, value = word[1:].partition("=")
            values[name] = value
    given = {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": str(launch.job.world_size),
    }
    values |= given
    ranks.from_open_mpi(values)
    return set(values) - set(given)


def test_documentation_lists_exactly_the_rank_variables_that_the_code_refuses() -> None:
    refused = re.search(r"are refused \((.*?)\)", section(VARIABLES, "Precedence"), re.DOTALL)
    assert refused
    assert sorted(code_words(refused[1])) == sorted(RANK_VARIABLES)


def test_shell_variables_that_workers_do_not_inherit_are_documented() -> None:
    dropped, kept = section(VARIABLES, "Dropped from the shell").split("except your own settings")
    prefixes = [word for word in code_words(dropped) if word.endswith("_")]
    assert sorted(prefixes) == sorted(environment._FOREIGN_PREFIXES)
    for prefix in prefixes:
        assert environment.inherited({f"{prefix}SOMETHING": "1"}) == {}

    own = [word.rstrip("*") for word in code_words(kept)]
    assert sorted(own) == sorted((*environment._USERS_OWN, *environment._MPI_SETTINGS))
    for name in own:
        assert environment.inherited({name: "1"}) == {name: "1"}


# --- tests of the command line


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The folder of a workspace with one run that has ended."""
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "train.py").write_text(
        "import paceline\nprint('a line')\npaceline.Run.get_context().log('loss', 1)\n"
    )
    assert paceline("run", "source/train.py", "--json")["status"] == "Completed"
    return tmp_path


def paceline(*words: str) -> Any:
    """The JSON that the command line answers."""
    done = run_command(*Cli.argv(*words), environment=os.environ, folder=Path.cwd(), timeout_s=180)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_json_keys_of_a_run_are_documented(tmp_path: Path) -> None:
    folder, _ = make_run(tmp_path / "runs")
    of_summary = first_column(section(COMMANDS, "status, submit, run, rerun, list"))
    assert of_summary == list(summary(folder))
    assert {*of_summary, *first_column(section(COMMANDS, "show"))} == set(details(folder))


@pytest.mark.promise("verb-option-json-key-documented")
def test_json_of_every_command_has_the_documented_keys(finished: Path) -> None:
    keys = first_column(section(COMMANDS, "status, submit, run, rerun, list"))
    status = paceline("status", "--json")
    assert list(status) == keys
    assert list(paceline("list", "--json")[0]) == [*keys, *first_column(section(COMMANDS, "Runs of list"))]
    submitted = paceline("submit", "source/train.py", "--json")
    again = paceline("rerun", status["run_id"], "--detach", "--json")
    assert list(submitted) == list(again) == keys

    # Use the ended run, because the latest run may not have logged anything yet.
    ended = status["run_id"]
    metrics = [*paceline("metrics", ended, "--json"), *paceline("metrics", ended, "--name", "loss", "--json")]
    assert list(dict.fromkeys(key for found in metrics for key in found)) == first_column(
        section(COMMANDS, "Runs of metrics")
    )
    paceline("cancel", submitted["run_id"], again["run_id"], "--wait", "--json")
    plan = paceline("run", "source/train.py", "--dry-run", "--json")
    dry_run = tables(section(COMMANDS, "A dry run"))[0]
    assert list(plan) == [code_words(row[0])[0] for row in dry_run]
    assert list(plan["commands"][0]) == code_words(dry_run[-1][1])


@pytest.mark.promise("verb-option-json-key-documented")
@pytest.mark.parametrize(
    ("heading", "verbs"),
    [
        ("run, submit", ("run", "submit")),
        ("status, list, show", ("list",)),
        ("logs", ("logs",)),
        ("metrics", ("metrics",)),
        ("files, download", ("download",)),
        ("rm, restore, prune", ("rm", "restore", "prune")),
        ("check", ("check",)),
        ("serve", ("serve",)),
    ],
)
def test_every_option_is_documented(heading: str, verbs: tuple[str, ...]) -> None:
    real = {
        option
        for verb in verbs
        for parameter in app.load(verb).params
        for option in parameter.opts
        if option.startswith("-") and option not in ("-h", "--help")
    }
    written = {word.split()[0] for word in first_column(section(COMMANDS, heading)) if word.startswith("-")}
    # The option --json of `list` is documented in a separate sentence.
    assert real - {"--json"} == written - {"--json"}


@pytest.mark.promise("verb-option-json-key-documented")
def test_every_command_is_documented() -> None:
    text = prose(COMMANDS)
    assert not [verb for verb in VERBS if not re.search(rf"^##+ .*\b{verb}\b", text, re.MULTILINE)]


# --- tests of runs


@pytest.mark.promise("states-causes-failure-record-s")
def test_run_states_are_documented_in_their_order() -> None:
    assert first_column(section(RUNS, "States")) == list(states.ALL)


@pytest.mark.promise("states-causes-failure-record-s")
def test_the_causes_of_failure_are_documented_with_their_meaning() -> None:
    report, causes = tables(section(RUNS, "Failure"))
    assert {code_words(name)[0]: meaning for name, meaning in causes} == CAUSES
    keys = [word for name, _ in report for word in code_words(name)]
    assert sorted(keys) == sorted(FailureReport(cause="user", message="").to_json())


@pytest.mark.promise("states-causes-failure-record-s")
def test_docs_and_docstring_list_every_field_of_a_run_record() -> None:
    explained = re.findall(r"^ *(\w+): ", str(RunRecord.__doc__), re.MULTILINE)
    assert set(make_record().to_json()) - {"version"} <= set(explained)
    [attempts] = [
        text for name, text in tables(section(COMMANDS, "show"))[0] if code_words(name) == ["attempt_records"]
    ]
    assert code_words(attempts) == list(Attempt(number=1, started_utc="").to_json())


# --- tests of estimators, targets and launchers


@pytest.mark.promise("estimators-sdk-s-names-defaults")
def test_page_and_help_have_each_parameter_of_the_estimators() -> None:
    written = first_column(parameters())
    assert len(written) == len(set(written))
    assert set(written) == {field.name for cls in ESTIMATORS for field in fields(cls)}
    for cls in ESTIMATORS:
        explained = re.findall(r"^ *(\w+): ", str(cls.__doc__), re.MULTILINE)
        assert {field.name for field in fields(cls)} <= set(explained), cls


def test_documentation_of_an_estimator_parameter_says_which_estimators_accept_it() -> None:
    for names, meaning in tables(parameters())[0]:
        for name in code_words(names):
            lacking = [cls for cls in ESTIMATORS if name not in {field.name for field in fields(cls)}]
            assert ("not with `SKLearn`" in meaning) == (lacking == [SKLearn]), name
            assert ("`TensorFlow` with `ps`" in meaning) == (lacking == [Estimator, PyTorch, SKLearn]), name


def test_the_estimators_backends_are_documented() -> None:
    written = {
        code_words(name)[0]: code_words(backends)
        for name, backends in tables(section(ESTIMATORS_PAGE, "Estimators"))[0]
    }
    assert written == {cls.__name__: list(cls.backends) for cls in ESTIMATORS}


def parameters() -> str:
    return section(ESTIMATORS_PAGE, "Parameters")


def test_the_launcher_of_each_backend_is_documented() -> None:
    page = DOCS / "launchers.md"
    for backends, launcher, _ in tables(section(page, "Launchers"))[0]:
        for backend in code_words(backends) or (None,):
            job = Job(
                entry_script="train.py",
                distributed_backend=backend,
                use_gpu=backend == "nccl",
                parameter_server_count=int(backend == "ps"),
            )
            assert f"`{job.launcher}`" == launcher


def test_the_methods_of_a_launcher_are_documented() -> None:
    written = [word.partition("(")[0] for word in first_column(section(DOCS / "launchers.md", "Adding one"))]
    real = [name for name, value in vars(Launcher).items() if callable(value) and not name.startswith("_")]
    assert sorted(written) == sorted(real)


# --- tests of configuration


def test_every_paceline_environment_variable_in_the_source_is_documented() -> None:
    source = "".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    pages = "".join(path.read_text() for path in (DOCS / "configuration.md", VARIABLES))
    assert not ours(source) - ours(pages)


def test_every_documented_paceline_environment_variable_occurs_in_the_source_tests_or_makefile() -> None:
    readers = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), ROOT / "Makefile"]
    read = ours("".join(path.read_text() for path in readers if path != Path(__file__)))
    for page in PAGES:
        assert not ours(page.read_text()) - read, page


def ours(text: str) -> set[str]:
    return set(re.findall(r"\bPACELINE_[A-Z]+(?:_[A-Z]+)*\b(?!_)", text))
