"""A job file has the same meaning as the command line, and `--dry-run --yaml` writes it."""

from __future__ import annotations

import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.cli.options import VerbOption
from paceline.cli.run_options import RUN
from paceline.errors import JobError
from paceline.job_files import job_file
from paceline.job_files.description import asked, combined, whole
from tests.cli.conftest import Cli

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
NAMES = st.text(string.ascii_uppercase, min_size=1, max_size=6).map("X{}".format)


@st.composite
def descriptions(draw: st.DrawFn, folder: Path) -> dict[str, Any]:
    said: dict[str, Any] = {"source_directory": str(folder), "entry_script": "train.py"}
    if draw(st.booleans()):
        said = {"source_directory": str(folder), "entry_module": "pkg.train"}
    optional: dict[str, st.SearchStrategy[Any]] = {
        "arguments": st.lists(
            WORDS
            | st.sampled_from(
                [
                    "yes",
                    "1:30",
                    "0o17",
                    "3.10",
                    "null",
                    "~",
                    "- a",
                    "#",
                    "=",
                    "2x2",
                    "${lr}",
                    "$${lr:0.1}",
                    "a${b:}c",
                    "${RANK}",
                ]
            )
        ),
        "experiment": st.sampled_from(["no", "on", "e1", "1e3"]),
        "display_name": WORDS.filter(str.strip),
        "environment_variables": st.dictionaries(NAMES, WORDS, max_size=3),
        "secrets": st.dictionaries(NAMES.map("S{}".format), st.sampled_from(["env:A", "keyring:a/b", "file:~/x#y"])),
        "use_gpu": st.booleans(),
        "gpu_visibility": st.sampled_from(["worker", "node"]),
        "gpu_share": st.just("1"),
        "cores": st.integers(0, 4),
        "max_run_duration_seconds": st.floats(0.5, 1e6).map(lambda value: round(value, 3)),
        "grace_period_seconds": st.just(0.0) | st.integers(1, 10**6).map(float),
        "max_restarts": st.integers(1, 3),
        "hang_seconds": st.sampled_from([0, 1.5, 600]),
        "log_limit": st.sampled_from(["500MB", "0"]),
        "notify": st.lists(st.sampled_from(["mail:a@b.c", "slack:env:HOOK", "command:./told.sh 'a b'"])),
        "custom_docker_image": st.just("lab/torch:2"),
        "tags": st.dictionaries(NAMES, st.none() | WORDS, max_size=3),
    }
    said |= draw(st.fixed_dictionaries({}, optional=optional))
    if said.get("notify"):
        said["notify_on"] = draw(st.lists(st.sampled_from(["start", "failure"]), unique=True))
    if said.get("max_restarts"):
        said["restart_on_exception"] = draw(st.booleans())
    shape = draw(st.sampled_from(["one", "gloo", "ps"]))
    if shape == "gloo":
        said |= {"node_count": 2, "process_count_per_node": 3, "distributed_backend": "gloo"}
    if shape == "ps":
        said |= {"node_count": 2, "process_count_per_node": 2, "distributed_backend": "ps", "parameter_server_count": 1}
    return {key: value for key, value in said.items() if value not in (None, [], {})}


@pytest.mark.promise("job-file-written-read-same")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_job_description_written_to_a_job_file_is_read_back_unchanged(data: st.DataObject, tmp_path: Path) -> None:
    said = data.draw(descriptions(tmp_path))
    file = tmp_path / "job.yaml"
    file.write_text(job_file.text(whole(said)), encoding="utf-8")

    assert job_file.read(file) == said
    assert asked(job_file.read(file)) == asked(said)


def test_dry_run_writes_a_job_file_that_runs_the_same_job(cli: Cli) -> None:
    script = """
        import os, sys
        print(*sys.argv[1:], os.environ["A"], os.environ["S"], os.environ["F"], open(os.environ["PACELINE_INPUT_d"]).read())
    """
    cli.script(script)
    cli.script("F=of file", "values.env")
    cli.script("data", "data.txt")
    words = [
        *(
            "src/train.py",
            "--env",
            "A= 1",
            "--env",
            "S",
            "--env-file",
            "values.env",
            "--tag",
            "t",
            "--input",
            "d=data.txt",
        ),
        *("--name", "a: name", "-e", "exp", "--grace", "1m", "--max-duration", "1h", "-j", "1x1"),
    ]
    said = ["--", "--epochs", "1_0", "a b"]
    text = cli("run", *words, "--dry-run", "--yaml", *said, env={"S": "hidden"}).stdout
    (cli.folder / "jobs").mkdir()
    (cli.folder / "jobs" / "job.yaml").write_text(text)
    given = {"S": "hidden"}
    first = cli("run", "--dry-run", "--json", *words, *said, env=given).stdout
    again = cli("run", "--dry-run", "--json", "jobs/job.yaml", env=given).stdout

    assert "hidden" not in text
    assert "of file" not in text
    assert first == again
    assert cli("run", "-q", "jobs/job.yaml", env={"S": "s"}).stdout == "--epochs 1_0 a b  1 s of file data\n"
    (run,) = cli.json("list")
    assert (run["experiment"], run["display_name"], run["tags"]) == ("exp", "a: name", {"t": None})
    over = cli("run", "-q", "jobs/job.yaml", "--env", "A=2", "-e", "other", "--tag", "u=1", "--", "x", env={"S": "s"})
    assert over.stdout == "x 2 s of file data\n"
    assert cli.json("list", "-e", "other")[0]["tags"] == {"t": None, "u": "1"}


def test_job_file_paths_are_relative_to_the_file_and_yaml_values_such_as_010_and_no_stay_text(cli: Cli) -> None:
    cli.script("import os, sys; print(sys.argv[1:], os.environ['V'], os.environ['N'])", "a/code/train.py")
    text = """
        entry_script: train.py
        source_directory: code
        script_params: {--version: 3.10, --flag: , --on: yes}
        arguments: [--on, no, last]
        environment_variables:
          V: 010
          N: no
        max_run_duration_seconds: 1:00:00
        tags: {bare: }
    """
    cli.script(text, "a/job.yml")
    assert (
        cli("run", "-q", "a/job.yml").stdout
        == "['--version', '3.10', '--flag', '--on', 'yes', '--on', 'no', 'last'] 010 no\n"
    )
    (run_id,) = cli.run_ids()
    assert cli.json("show", run_id)["job"]["max_run_duration_seconds"] == 3600.0


def wrong() -> Iterator[tuple[str, str]]:
    yield "- a", "is not a job"
    yield "a: [", "is not YAML"
    yield "node_count: two", "line 1: node_count: 'two' is not a number."
    yield "node_count: 4..2", "line 1: node_count=4..2: the fewest nodes come first. Write 2..4."
    yield "node_count: [0, 3]", "line 1: node_count=0..3: a run has at least one node. Write 1..3."
    yield "node_count: [2, 3, 4]", "line 1: node_count takes a number, or the fewest and the most as in 2..4."
    yield "use_gpu: 1", "line 1: use_gpu: '1' is neither true nor false."
    yield "max_restarts: -1", "max_restarts: '-1' is not a number."
    yield "grace_period_seconds: soon", "grace_period_seconds: 'soon' is not a duration."
    yield "arguments: --epochs 5", "arguments takes a list."
    yield "environment_variables: [A=1]", "environment_variables takes names and values"
    yield "environment_variables: {A: }", "environment_variables: A has no value."
    yield "environment_variables: {A: [1]}", "environment_variables takes a mapping here."
    yield "experiment: a\nexperiment: b", "line 2: experiment is given twice."
    yield "entry_script: a.py\nsecrets: {A: hunter2}", "a secret is named by its place"
    yield "entry_script: a.py\nentry_module: a", "only one can run"


@pytest.mark.parametrize(("text", "message"), [*wrong()], ids=[text for text, _ in wrong()])
def test_invalid_job_file_is_refused_with_line_and_key(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"{text}\n")
    with pytest.raises(JobError) as refused:
        asked(combined(job_file.read(file), {}))

    assert message in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_command_line_overrides_the_job_file_and_mappings_are_merged() -> None:
    below = {"entry_script": "a.py", "node_count": 2, "worker_count": 3, "secrets": {"A": "env:A", "B": "env:B"}}
    above = {"entry_module": "m", "process_count_per_node": 4, "environment_variables": {"A": "1"}}

    assert combined(below, above) == {
        "node_count": 2,
        "process_count_per_node": 4,
        "entry_module": "m",
        "secrets": {"B": "env:B"},
        "environment_variables": {"A": "1"},
    }


@pytest.mark.parametrize("option", [option for option in RUN if option.key in job_file.KEYS], ids=lambda one: one.name)
def test_each_run_option_maps_to_its_documented_job_file_key(option: VerbOption) -> None:
    """Each option of `paceline run` that has a key in job files."""
    assert job_file.OPTIONS.get(option.name, option.name) == option.key
