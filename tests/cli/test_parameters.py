"""Parameters of job files, and the templates that a workspace keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import JobError
from paceline.job_files import job_file
from tests.cli.conftest import Cli

FILE = """
entry_script: train.py
source_directory: src
node_count: ${nodes:1}
script_params:
  --lr: ${lr:0.1}
  --again: "${lr}"
  --text: $${lr} ${RANK} ${HOME:-x}
  --flag: ${flag:}
tags: {data: "${data}"}
"""
PRINT = "import sys; print(*sys.argv[1:])"


def read(tmp_path: Path, text: str, **parameters: str) -> dict[str, object]:
    return job_file.read(tmp_path / "job.yaml", text=text, parameters=parameters)


def test_given_template_parameters_replace_defaults_and_are_not_substituted_again(tmp_path: Path) -> None:
    found = read(tmp_path, FILE, data="mnist", nodes="2..4", lr="1e-3")

    assert found["node_count"] == "2..4"
    assert found["tags"] == {"data": "mnist"}
    text = ["--lr", "1e-3", "--again", "1e-3", "--text", "${lr} ${RANK} ${HOME:-x}", "--flag"]
    assert found["arguments"] == text
    assert read(tmp_path, FILE, data="${lr}")["tags"] == {"data": "${lr}"}, "a value is not searched for parameters"


def test_template_parameter_in_the_sweep_section_of_a_job_file_gets_its_yaml_type_unless_quoted(tmp_path: Path) -> None:
    text = "entry_script: a.py\nsweep: {trials: 3, seed: 0}\n".replace("3", '"${n:3}"')
    plain = "entry_script: a.py\nsweep:\n  trials: ${n:3}\n  name: ${name:}\n"

    assert job_file.read(tmp_path / "s.yaml", ("sweep",), text=text)["sweep"] == {"trials": "3", "seed": 0}
    assert job_file.read(tmp_path / "s.yaml", ("sweep",), text=plain)["sweep"] == {"trials": 3, "name": None}


def test_escaped_parameter_reached_through_a_yaml_alias_is_substituted_only_once(tmp_path: Path) -> None:
    text = "entry_script: a.py\nexperiment: &name $${lr}\narguments: [*name]\n"

    assert read(tmp_path, text)["arguments"] == ["${lr}"]


@pytest.mark.parametrize(
    ("text", "given", "message"),
    [
        ("a: ${lr:1}", {"lrr": "2"}, "job.yaml' has no parameter 'lrr'. Did you mean 'lr'? It has lr."),
        ("a: b", {"lr": "2"}, "has no parameter 'lr'. It has none: a file has ${lr:DEFAULT} in a value"),
        ("a: b\nb: ${lr} ${x}", {}, "line 2: no value for lr, x. Write lr=VALUE behind the file's name, or a default"),
        ("a: ${lr:1}\nb: ${lr:2}", {}, "line 2: parameter lr has the default '2' here and '1' in line 1. Write the"),
        ("a: [--lr, ${lr:1}]", {}, 'needs quotes: "${lr:0.1}"'),
        ("entry_script: a\nnode_count: ${n}", {"n": "two"}, "line 2: node_count: 'two' is not a number."),
    ],
)
def test_job_file_refuses_an_unknown_or_missing_template_parameter_with_the_next_step(
    tmp_path: Path, text: str, given: dict[str, str], message: str
) -> None:
    with pytest.raises(JobError) as raised:
        job_file.read(tmp_path / "job.yaml", text=text, parameters=given)

    assert message in str(raised.value)


@pytest.mark.promise("job-file-parameters")
def test_name_equals_value_after_a_job_file_sets_a_parameter_but_after_two_dashes_an_argument(cli: Cli) -> None:
    cli.script(PRINT)
    cli.script(FILE, "job.yaml")

    assert cli("run", "-q", "job.yaml", "data=a", "lr=2").stdout.startswith("--lr 2 --again 2 --text ${lr}")
    assert cli("run", "-q", "job.yaml", "data=a", "--", "lr=3").stdout == "lr=3\n"
    wrong = cli("run", "job.yaml", "data=a", "fast", code=2)
    assert "'fast' behind job.yaml is not NAME=VALUE" in wrong.stderr
    wrong = cli("run", "job.yaml", "data=a", "data=b", code=2)
    assert "'data=b': data has the value 'a' already. Give one value." in wrong.stderr
    wrong = cli("run", "job.yaml", "data=a", "lr=2", "--", "x", code=2)
    assert "lr=2 has no effect: the arguments behind `--` replace script_params and arguments of" in wrong.stderr
    assert "no value for data" in cli("submit", "job.yaml", code=2).stderr
    assert [run["tags"] for run in cli.json("list")] == [{"data": "a"}, {"data": "a"}]


@pytest.mark.promise("templates")
def test_added_template_runs_from_any_folder_even_after_its_job_file_was_deleted(cli: Cli) -> None:
    cli.script(PRINT)
    cli.script(FILE, "job.yaml")
    told = cli("template", "add", "digits", "job.yaml").stdout
    (cli.folder / "job.yaml").unlink()
    (cli.folder / "elsewhere").mkdir()

    assert "It takes nodes, lr, flag, data." in told
    workspace = {"PACELINE_WORKSPACE": str(cli.folder / ".paceline")}
    done = cli("run", "-q", "--template", "digits", "lr=5", "data=b", cwd=cli.folder / "elsewhere", env=workspace)
    assert done.stdout.startswith("--lr 5 --again 5")
    assert cli("run", "-q", "--template", "digits", "data=b", "--", "x").stdout == "x\n"
    (row,) = cli.json("template", "list")
    assert row["parameters"] == {"nodes": "1", "lr": "0.1", "flag": "", "data": None}
    assert cli.json("template", "show", "digits")["text"] == (FILE)
    assert "lr = 0.1" in cli("template", "show", "digits").stdout
    cli("template", "remove", "digits")
    assert "There is no template." in cli("template", "list").stdout
    assert "there is no template 'digits'" in cli("run", "--template", "digits", code=2).stderr


def test_invalid_template_or_template_call_is_refused(cli: Cli) -> None:
    cli.script(PRINT)
    cli.script("entry_script: src/train.py", "job.yaml")
    cli.script("entry_script: a.py\nenvironment_variables: {HF_TOKEN: hf_abcdefghijklmnopqrstuvwxyz01}", "secret.yaml")
    cli.script("entry_script: a.py\nnode_cuont: 1", "typo.yaml")
    cli("template", "add", "one", "job.yaml")

    for words, text in (
        (("one", "job.yaml"), "a template 'one' exists already"),
        (("a/b", "job.yaml"), "the template's name 'a/b' must begin with"),
        (("two", "none.yaml"), "can't be read"),
        (("two", "typo.yaml"), "Did you mean node_count?"),
        (("two", "secret.yaml"), "looks like a secret, which a template would keep"),
    ):
        assert text in cli("template", "add", *words, code=2).stderr
    cli("template", "add", "--replace", "one", "job.yaml")
    wrong = cli("run", "--template", "one", "-m", "pkg", code=2).stderr
    assert "--template one and -m pkg: only one can run" in wrong
