"""The tutorials on other machines: their cells unchanged, except for the one word that names the target."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import DOCS, README, blocks
from tests.docs.test_docs import assert_prints_what_it_says
from tests.docs.test_tutorials import ENGLISH, execute, is_elsewhere, notebook, require_what_it_needs, text_of
from tests.engines.places import place

HOROVOD, LAPTOP = ENGLISH[1], ENGLISH[3]

pytestmark = pytest.mark.slow


def on_target(page: Path, last: str) -> dict[str, Any]:
    """The notebook up to the cell that has `last` in it, with target `there`."""
    book = notebook(page)
    end = next(number for number, cell in enumerate(book["cells"]) if last in "".join(cell["source"]))
    text = json.dumps(book["cells"][: end + 1])
    assert text.count(r"TARGET = \"local\"") == 1
    return {**book, "cells": json.loads(text.replace(r"TARGET = \"local\"", r"TARGET = \"there\""))}


def printed_there(page: Path, last: str, way: str, request: pytest.FixtureRequest, folder: Path) -> tuple[str, Any]:
    """What the last cell but those before it printed, and where it ran."""
    require_what_it_needs(page)
    with pytest.MonkeyPatch.context() as monkeypatch, place(way, request, folder, monkeypatch) as there:
        monkeypatch.chdir(folder)
        monkeypatch.setenv("PACELINE_WORKSPACE", str(there.lab.workspace_dir))
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        book = execute(on_target(page, last), folder)
        if way == "slurm":
            for block in blocks(page, "console"):
                if is_elsewhere(block.text) and re.search(r"\bcluster\b", block.text):
                    assert_prints_what_it_says(block)
        return "".join(text_of(cell) for cell in book["cells"]), there


# Only `make proof` runs this test: `make test` runs the notebook on this machine, and the README has the same commands
# for two hosts.
@pytest.mark.promise("tutorials-notebooks-made-their-pages")
@pytest.mark.proof
@pytest.mark.parametrize("way", ["ssh", "slurm"])
def test_commands_of_the_second_tutorial_train_on_two_other_machines(
    way: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    printed, there = printed_there(HOROVOD, "sums[", way, request, tmp_path)
    for rank in range(2):
        assert re.search(rf"rank {rank} of 2 on node {rank} \({there.hosts[rank]}\)", printed), printed
    assert re.search(r"epoch 3: loss \S+  accuracy 0\.[89]\d* on 2 workers", printed), printed
    sums = json.loads(printed.splitlines()[-1].replace("'", '"'))
    assert sums["0"] == sums["1"]


@pytest.mark.proof
@pytest.mark.parametrize("way", ["ssh", "slurm"])
def test_training_of_the_fourth_tutorial_resumes_after_its_crash_on_other_machines(
    way: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    printed, there = printed_there(LAPTOP, 'metrics("accuracy").steps', way, request, tmp_path)
    assert "[rank 0] goes on with epoch 3" in printed
    assert printed.splitlines()[-1] == "(0, 1, 2, 3, 4, 5)"
    assert f"attempt 2 on {there.hosts[0]} {there.hosts[1]} ended by None" in printed


@pytest.mark.promise("tutorials-notebooks-made-their-pages")
@pytest.mark.parametrize("page", [HOROVOD, LAPTOP], ids=lambda page: page.stem)
def test_ssh_commands_of_a_tutorial_are_on_the_readme_or_examples_page(page: Path) -> None:
    """Or those of the page of examples: both are run on two such hosts."""
    found = [block for block in blocks(page, "console") if re.search(r"\blab\b", block.text)]
    assert found
    tested = [block for tested_page in (README, DOCS / "examples.md") for block in blocks(tested_page, "console")]
    assert [block for block in found if block not in tested] == []
