"""`paceline pipeline`, as a user types it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers import write_tree

PREPARE = "import sys; open(sys.argv[1] + '/x', 'w').write(sys.argv[2])"
TRAIN = "import sys; print('read', open(sys.argv[1] + '/x').read()); sys.exit(int(sys.argv[2]))"

FILE = """
experiment: filed
source_directory: src
parameters: {text: hello, code: 0}
tags: {kind: test}
steps:
  prepare:
    entry_script: prepare.py
    arguments: [$clean, "${text}"]
    leaves: [clean]
  train:
    entry_script: train.py
    arguments: [$raw, $code]
    takes: [raw]
  late:
    entry_script: prepare.py
    arguments: [$other, there]
    leaves: {other: "default:mine"}
    after: [train]
    allow_reuse: false
"""


@pytest.mark.promise("pipeline-file-run-shown-command")
def test_pipeline_run_executes_the_steps_of_a_file_and_pipeline_show_lists_their_states(cli: Any) -> None:
    write_tree(cli.folder / "src", {"prepare.py": PREPARE, "train.py": TRAIN})
    write_tree(cli.folder, {"p.yaml": FILE.replace("raw", "clean")})
    plan = cli("pipeline", "run", "p.yaml", "--dry-run").stdout.splitlines()
    assert [line.split()[:3] for line in plan[1:]] == [
        ["prepare", "local", "-"],
        ["train", "local", "prepare"],
        ["late", "local", "train"],
    ]
    assert not (cli.folder / ".paceline" / "runs").exists()

    done = cli("pipeline", "run", "p.yaml", "--param", "text=moin")
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["STEP", "STATUS"],
        *(["prepare", "Completed"], ["train", "Completed"], ["late", "Completed"]),
    ]
    assert "step train begins: filed_" in done.stderr
    assert (cli.folder / ".paceline/data/mine/x").read_text() == "there"
    (listed,) = cli.json("list")
    assert (listed["type"], listed["experiment"], listed["tags"]) == ("pipeline", "filed", {"kind": "test"})
    assert len(cli.json("list", "--trials")) == 4
    shown = cli.json("pipeline", "show")
    assert shown["parameters"] == {"text": "moin", "code": 0}
    train = shown["steps"][1]
    assert (train["step"], train["status"], train["after"]) == ("train", "Completed", ["prepare"])
    assert cli("logs", train["run_id"]).stdout == "read moin\n"
    assert cli.json("show", train["run_id"])["step"]["name"] == "train"
    assert f"1  train  Completed  {train['run_id']}" in cli("show", listed["run_id"]).stdout

    assert "step train begins: filed_" in cli("logs", listed["run_id"]).stdout
    # Running a step again must not change the data folder of the pipeline.
    again = cli.json("rerun", shown["steps"][0]["run_id"], "-q")["run_id"]
    left = cli.folder / ".paceline/data/pipelines"
    assert sorted(path.name for path in left.iterdir()) == sorted((again, shown["steps"][0]["run_id"]))

    # The exit code is that of the first failed step.
    failed = cli("pipeline", "run", "p.yaml", "--param", "text=moin", "--param", "code=7", code=7)
    assert f"reused from {shown['steps'][0]['run_id']}" in failed.stdout
    assert "step 'train'" in failed.stderr
    assert "late     Skipped" in cli("pipeline", "show").stdout
    assert "is a pipeline. Submit it again" in cli("rerun", listed["run_id"], code=1).stderr
    assert "is not a pipeline" in cli("pipeline", "show", train["run_id"], code=2).stderr


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("steps: [a]", (), "is not a pipeline. Write `steps:`"),
        (
            "steps: {a: {entry_script: a.py, takes: [x]}}",
            (),
            "step 'a' takes 'x', which no step leaves. They leave nothing",
        ),
        ("steps: {a: {entry_script: a.py, after: [b]}}", (), "step 'a' runs after 'b', but the file has no such step"),
        ("steps: {a: {entry_script: a.py, leaves: x}}", (), "step 'a': leaves takes a list of names, such as [clean]"),
        ("steps: {a: {entry_script: a.py, take: [x]}}", (), "unknown key 'take'. Did you mean takes?"),
        (
            "steps: {a: {entry_script: a.py, leaves: [x]}, b: {entry_script: a.py, leaves: [x]}}",
            (),
            "two steps leave 'x'",
        ),
        ("steps: {a: {entry_script: b.py}}", (), "step 'a': entry_script 'b.py' is not in"),
        ("steps: {a: {entry_script: a.py}}", ("--param", "x"), "--param 'x' is not NAME=VALUE"),
        (
            "steps: {a: {entry_script: a.py}}",
            ("--param", "x=1"),
            "'x' is given, which is not a parameter of the pipeline",
        ),
        ("steps: {a: b}", (), "step 'a' takes keys and values"),
    ],
    ids=["list", "takes", "after", "leaves", "key", "twice", "script", "word", "parameter", "word for a step"],
)
def test_invalid_pipeline_file_is_refused_and_no_run_is_created(cli: Any, text: str, words: Any, said: str) -> None:
    write_tree(cli.folder, {"a.py": "", "p.yaml": text})
    assert said in cli("pipeline", "run", "p.yaml", *words, code=2).stderr
    assert not list((cli.folder / ".paceline").glob("runs/*"))
