"""The list of promises: each named test exists, and no promise is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import promises
from tests.conftest import COLLECTED

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "promises.md"
BENCHMARKS = ROOT / "benchmarks"
#: Pattern of the variables with which tests do more, for example more kills.
_FULL = re.compile(r"PACELINE_(?:CHAOS_KILLS|SWEEP_KILLS|ENDURANCE_STEPS|PLANS|LARGE|LOSSES)")


class Promise(NamedTuple):
    """One line. proof: the variable by which `make proof` does the full number, as `NAME=VALUE`; "" if there is none."""

    says: str
    tests: tuple[str, ...]
    benchmarks: tuple[str, ...]
    results: tuple[str, ...]
    proof: str


def read(text: str) -> list[Promise]:
    """Return the promises of the page: sentences, then names in backquotes; code within a sentence is no such name."""
    found = []
    for line in text.splitlines():
        if not line.startswith("- "):
            continue
        names = re.findall(r"`([^`]+)`", line)
        found.append(
            Promise(
                line[2:].partition(" `")[0],
                tuple(f"tests/{name}" for name in names if "::" in name),
                tuple(name for name in names if re.fullmatch(r"\w+\.py", name)),
                tuple(name for name in names if name.startswith("results/")),
                next((name for name in names if _FULL.match(name)), ""),
            )
        )
    return found


PROMISES = read(PAGE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def collected(request: pytest.FixtureRequest) -> set[str]:
    """Every test of the files that the page names, by its whole id and without its parameters."""
    files = sorted({test.partition("::")[0] for promise in PROMISES for test in promise.tests})
    missing = [file for file in files if not (ROOT / file).exists()]
    assert not missing, f"no such files of tests: {missing}"
    # If all tests run, use their ids. Collecting the tests again would load their modules.
    ids = set(request.config.stash[COLLECTED]) if is_whole(request.config) else set()
    if others := sorted(set(files) - {name.partition("::")[0] for name in ids}):
        ids |= collect(others)
    return ids | {name.partition("[")[0] for name in ids}


def is_whole(config: pytest.Config) -> bool:
    """Return whether whole folders or files of tests were requested: otherwise not all tests are known."""
    return all("::" not in word for word in config.args)


def collect(files: list[str]) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:xdist", *files],
        cwd=ROOT,
        # Set PACELINE_PROOF, because promises also name tests that `make test` leaves out.
        env={name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"} | {"PACELINE_PROOF": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return {line for line in done.stdout.splitlines() if "::" in line}


def test_promises_page_in_the_docs_equals_the_output_of_its_generator() -> None:
    assert PAGE.read_text(encoding="utf-8") == promises.page(), "run python -m tests.promises"


def test_promise_marker_of_each_test_names_an_existing_promise() -> None:
    names = [promise.name for section in promises.read_promises().values() for promise in section]
    assert len(names) == len(set(names))
    assert sorted(set(promises.marked_tests()) - set(names)) == []


def test_each_promise_has_a_test_or_a_benchmark():
    assert len(PROMISES) > 80
    assert [promise.says for promise in PROMISES if not promise.tests and not promise.results] == []


def test_each_test_named_by_a_promise_exists(collected):
    assert [test for promise in PROMISES for test in promise.tests if test not in collected] == []


def test_promise_that_names_a_missing_test_is_detected(collected):
    (promise,) = read(
        "- It holds. `docs/test_promises.py::test_that_is_not_there` `job/test_job.py::test_job_is_immutable`"
    )
    assert [test in collected for test in promise.tests] == [False, True]


def test_every_benchmark_result_is_listed_on_the_promises_page():
    table = (BENCHMARKS / "table.py").read_text()
    names = re.findall(r'^    "(\w+)",$', table, re.MULTILINE)
    assert names
    named = [result for promise in PROMISES for result in promise.results]
    assert sorted(named) == sorted(f"results/{name}.json" for name in names)
    wrong = []
    for promise in PROMISES:
        for result in promise.results:
            script = json.loads((BENCHMARKS / result).read_text())["command"].split()[1].removeprefix("benchmarks/")
            if (script,) != promise.benchmarks or not (BENCHMARKS / script).exists():
                wrong.append(f"{result} was written by {script}, and the line names {promise.benchmarks}")
    assert wrong == []


def test_make_proof_runs_all_repeats_of_tests_that_make_test_runs_with_fewer_repeats():
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^proof:.*\bchaos\b", makefile, re.MULTILINE), "make proof does what make chaos does"
    assert re.search(r"^\tPACELINE_PROOF=1 .* -m proof$", makefile, re.MULTILINE), "it runs the tests marked so"
    readers = {
        str(path.relative_to(ROOT)): set(_FULL.findall(path.read_text()))
        for path in (ROOT / "tests").rglob("test_*.py")
        if path != Path(__file__)
    }
    asked = {(file, name) for file, names in readers.items() for name in names}
    assert asked
    kept = {
        (test.partition("::")[0], promise.proof.partition("=")[0]) for promise in PROMISES for test in promise.tests
    }
    assert sorted(asked - kept) == []
    for promise in PROMISES:
        if promise.proof:
            assert promise.proof in makefile, f"{promise.says}: the Makefile has no {promise.proof}"
            folders = {test.partition("::")[0] for test in promise.tests}
            assert any(file in makefile or str(Path(file).parent) in makefile for file in folders), promise.says
