"""Every block of every page is run, or looked up as far as it can be, or says that it is output."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import paceline
from paceline.runs import read, states
from paceline.runs.record import RunRecord
from paceline.services import store
from paceline.services.service import Service
from paceline.workspace import Workspace
from tests.docs.checking import check_python
from tests.docs.conftest import lacking
from tests.docs.kinds import HOW, Kind, kind_of, name_of, typed
from tests.docs.pages import PAGES, ROOT, Block, blocks
from tests.docs.reader import Reader, Scene
from tests.docs.scenes import LATER, SCENES
from tests.docs.test_translations import TRANSLATIONS
from tests.helpers import write_tree
from tests.warm import EXAMPLES, TENSORFLOW, fork_scripts

#: Page or folder of pages -> the test that runs their blocks instead of this test.
ELSEWHERE = {
    "tutorials": "test_notebook_runs_and_prints_the_shown_output",
    "reference-architecture.md": "test_example_trains_on_two_nodes_and_resumes_from_checkpoints",
}
ALL = (*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md")
#: Only the English pages are read, because a translation has the same blocks.
READ = [
    page
    for page in ALL
    if page not in TRANSLATIONS
    and not {page.name, page.parent.name} & set(ELSEWHERE)
    and any(block.language in ("python", "console") for block in blocks(page))
]

by_name = {"ids": lambda page: str(page.relative_to(ROOT))}


@pytest.mark.promise(
    "workers-without-gpus-find-other", "complete-examples-coming-pages-page", "commands-python-page-work-they"
)
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", READ, **by_name)
def test_code_blocks_of_a_documentation_page_run_and_print_the_shown_output(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_work(page, Scene(tmp_path, later=LATER.get(page.stem, ())), monkeypatch)


@pytest.mark.promise("complete-examples-coming-pages-page", "commands-python-page-work-they")
@pytest.mark.slow
@pytest.mark.proof
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [page for page in READ if page.stem in LATER], **by_name)
def test_code_blocks_of_a_page_including_slow_ones_run_and_print_the_shown_output(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_work(page, Scene(tmp_path), monkeypatch)


def assert_work(page: Path, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    needs = needs_of(page)
    lacking(needs)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    fork_scripts(monkeypatch, TENSORFLOW if "tensorflow" in needs else EXAMPLES)
    if page.stem in SCENES:
        SCENES[page.stem](scene, monkeypatch)
    reader = Reader(page, scene)
    try:
        reader.read()
        failed = [one.run_id for one in ended(Workspace(scene.folder / ".paceline")) if one.status == states.FAILED]
        assert len(failed) == reader.failures, (
            f"{page.name}: {failed} have failed, the page shows {reader.failures} failures"
        )
    finally:
        end_what_is_left(Workspace(scene.folder / ".paceline"))
    if page.stem == "concepts":  # this page claims that the printed losses are equal
        assert len({re.search(r"loss ([\d.]+)", text)[1] for text in reader.printed}) == 1


def needs_of(page: Path) -> set[str]:
    """The packages, and "Open MPI", that a page's blocks use."""
    text = "".join(block.text for block in blocks(page) if block.language in ("python", "console"))
    packages = {"torch", "tensorflow", "transformers", "joblib", "horovod"}
    found = {
        name for name in packages if re.search(rf"^ *(?:import|from) {name}\b|^\$ {name}run\b", text, re.MULTILINE)
    }
    if found & {"horovod"} or re.search(r"--backend mpi|collectives\.start|init_process_group\(\"mpi\"", text):
        found |= {"Open MPI"}
    return found - {"horovod"}


def ended(workspace: Workspace) -> list[RunRecord]:
    """The records of the page's runs, once they have ended."""
    for record in read.all_records(workspace.runs_dir):
        workspace.get_run(record.run_id).wait_for_completion(raise_on_error=False)
    return list(read.all_records(workspace.runs_dir))


def end_what_is_left(workspace: Workspace) -> None:
    """No service and no run of the page goes on after it."""
    for folder in store.all_folders(workspace.path):
        Service(workspace, folder.name).delete()
    for record in read.all_records(workspace.runs_dir):
        run = workspace.get_run(record.run_id)
        if run.status not in states.TERMINAL:
            run.cancel()
            run.wait_for_completion()


# --- each block is run


@pytest.mark.promise("commands-python-page-work-they")
@pytest.mark.parametrize("page", ALL, **by_name)
def test_every_block_of_a_page_is_runnable_or_marked_as_output(page: Path) -> None:
    found = blocks(page)
    assert page.read_text().count("```") == 2 * len(found), (
        f"a fence that is not closed, or has more than a word. {HOW}"
    )
    for block in found:
        try:
            kind = kind_of(block)
        except AssertionError as error:
            raise AssertionError(f"{page.name}, the block at line {block.line}: {error}") from None
        if kind is Kind.FILE:
            # Another block of the page must use this file, because otherwise no test would use the file.
            others = "".join(other.text for other in found if other is not block)
            name = Path(str(name_of(block)))
            assert re.search(rf"\b{re.escape(name.stem)}\b", others), f"{page.name}:{block.line}: nothing uses {name}"


def test_tests_that_pages_refer_to_exist() -> None:
    known = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    of_scenes = [name for maker in SCENES.values() for name in re.findall(r"\"(test_\w+)\"", inspect.getsource(maker))]
    assert of_scenes
    assert [name for name in (*of_scenes, *ELSEWHERE.values()) if f"def {name}(" not in known] == []
    assert set(SCENES) <= {page.stem for page in READ}


def test_console_commands_that_only_make_proof_runs_occur_on_their_documentation_pages() -> None:
    for page in READ:
        commands = [command for block in blocks(page, "console") for command, _ in typed(block)]
        for beginning in LATER.get(page.stem, ()):
            assert any(command.startswith(beginning) for command in commands), f"{page.name} has no {beginning!r}"
    assert set(LATER) <= {page.stem for page in READ}


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (Block("", "printed\n"), "a block of the language ''"),
        (Block("text", "paceline status\n"), "is a command, and nobody would see that it works"),
        (Block("text", "paceline statsu RUN\n"), "is a command"),
        (Block("console", "paceline status\n"), "begins with `$ `"),
        (Block("python", "a\n", "not run:"), "the comment 'not run:' above a block"),
    ],
    ids=["no language", "a command as text", "a form of no verb", "no prompt", "no reason"],
)
def test_unknown_kind_of_code_block_is_refused_with_the_valid_forms(block: Block, why: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(why)) as caught:
        kind_of(block)
    assert "what it prints below it" in str(caught.value)


def test_page_is_parsed_into_its_code_blocks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Page\n\n```python\n# a.py\n1\n```\n\n<!-- not run: it wants a cluster -->\n```console\n$ paceline x \\\n    --y\n"
        "done\n$ z\n```\n\n- in a list\n\n  ```text\n  $ is not a command here\n  ```\n"
    )
    file, commands, text = blocks(page)
    assert (kind_of(file), name_of(file), file.line) == (Kind.FILE, "a.py", 3)
    assert kind_of(commands) is Kind.CHECKED
    assert typed(commands) == [("paceline x \\\n    --y", ["done"]), ("z", [])]
    assert (text.language, text.text) == ("text", "$ is not a command here\n")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("```python\nprint('a')  # b\n```", "'b' is not in"),
        ("```python\nvalue = 1\n```\n\n```python\nvalu\n```", "NameError: name 'valu' is not defined"),
        ("```console\n$ echo one\ntwo\n```", "'two' is not in"),
        ("```console\n$ false\n```", "exit code 1"),
        ("<!-- exits with 3 -->\n```console\n$ true\n```", "exit code 0"),
        ("<!-- not run: why -->\n```console\n$ paceline logs --folow\n```", "No such option '--folow'"),
        ("<!-- not run: why -->\n```console\n$ paceline run train.py -j 2x4 --compute x\n```", "--backend"),
        ("<!-- not run: why -->\n```console\n$ paceline compute add x --kind ssh --hots a\n```", "--hots"),
        ("<!-- not run: why -->\n```console\n$ nosuch\n```", "how to check 'nosuch'"),
        ("<!-- not run: why -->\n```console\n$ pip install 'paceline[nosuch]'\n```", "no extra nosuch"),
        ("<!-- not run: why -->\n```python\nimport paceline\npaceline.Estimatr()\n```", "no 'Estimatr'"),
    ],
)
def test_failing_block_is_reported_with_its_page_and_line(text: str, why: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\n{text}\n")
    write_tree(tmp_path, {"train.py": ""})
    with pytest.raises(AssertionError, match=re.escape(why)) as caught:
        Reader(page, Scene(tmp_path)).read()
    assert "page.md, the block at line" in str(caught.value)


def test_shell_state_and_python_names_persist_between_blocks_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```text\n# deep/a.txt\nx\n```\n\n```console\n$ export A=1\n$ cd deep\n$ echo $A; ls\n1\na.txt\n```\n\n"
        "```python\nimport json\n```\n\n```python\nprint(json.dumps(2))  # 2\n```\n"
    )
    reader = Reader(page, Scene(tmp_path))
    reader.read()
    assert reader.printed[-1] == "1\na.txt\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import paceline as pl\npl.Workspace.from_config().get_rnu('a')", "line 2: Workspace has no 'get_rnu'"),
        ("from paceline import Sweeep", "line 1: "),
        ("import paceline.serverless", "line 1: "),
        ("import paceline as pl\npl.Estimator('src', entry_scrip='a.py')", "unexpected keyword argument 'entry_scrip'"),
        ("from paceline import Workspace\nfor name in Workspace.from_config(1, 2, 3): pass", "too many positional"),
        ("def go():\n    return nowhere", "line 2: 'nowhere' is not there"),
        ("import paceline as pl\npl.Workspace.from_config().get_run('a').cancl()", "Run has no 'cancl'"),
    ],
)
def test_names_in_python_blocks_that_are_not_run_are_checked(text: str, why: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(why)):
        check_python(text, {})


def test_valid_python_block_passes_the_static_name_check() -> None:
    every = """
import json, paceline as pl
from torch import nn

class Net(nn.Module):
    size: int = 3

    def forward(self, x, *rest, **named):
        return [y * self.size for y in rest if y] + sorted(named, key=lambda name: (name, x))

with open("a") as file, pl.Workspace.from_config() as other:
    pass
try:
    est = pl.Estimator("src", entry_script="train.py", **json.load(file))
except (OSError, pl.errors.UserError) as error:
    raise SystemExit(str(error)) from error
run = exp.submit(est, tags={"a": Net()})
run.folder.path, run.get_metrics()["loss"][-1], {a: b for a, b in run.tags.items()}
global_, *others = run.id.split("_")
others += [global_]
if (found := run.failure) is not None:
    print(f"{found.message!r:>10}")
"""
    check_python(every, {"exp": paceline.Experiment.__new__(paceline.Experiment)})
