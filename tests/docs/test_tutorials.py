"""The tutorials: a page, the notebook that is made of it, and its scripts as files; the notebook runs from top to end."""

from __future__ import annotations

import json
import os
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import LauncherError
from paceline.launchers.mpi import find_open_mpi
from tests.conftest import IS_PROOF
from tests.docs.pages import ROOT, blocks
from tests.docs.printed import assert_printed
from tests.docs.test_docs import assert_prints_what_it_says
from tests.docs.test_translations import TRANSLATIONS
from tests.engines.conftest import require_engine
from tests.helpers import write_tree
from tests.sweeps.helpers import hide_matplotlib
from tests.warm import fork_scripts

MAKER = runpy.run_path(str(ROOT / ".ci" / "notebooks.py"))
PAGES: list[Path] = MAKER["pages"]()
ENGLISH = [page for page in PAGES if page not in TRANSLATIONS]
SCRIPTS = ROOT / "examples" / "tutorials"


def notebook(page: Path) -> dict[str, Any]:
    book: dict[str, Any] = json.loads(page.with_suffix(".ipynb").read_text())
    return book


def test_there_are_four_tutorials() -> None:
    assert [page.name[:3] for page in ENGLISH] == ["01-", "02-", "03-", "04-"]


@pytest.mark.promise("tutorials-notebooks-made-their-pages")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_tutorial_notebook_equals_the_notebook_generated_from_its_page(page: Path) -> None:
    made = MAKER["notebook"](page.read_text())
    assert page.with_suffix(".ipynb").read_text() == made, "run python .ci/notebooks.py"


@pytest.mark.promise("tutorials-notebooks-made-their-pages")
@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.stem)
def test_scripts_of_a_page_equal_the_example_files(page: Path) -> None:
    files = [MAKER["file_of"](block.text) for block in blocks(page, "python")]
    files = [file for file in files if file]
    assert files
    for name, text in files:
        assert (SCRIPTS / name).read_text() == text, name


def test_every_example_file_is_shown_on_a_page() -> None:
    files = [MAKER["file_of"](block.text) for page in ENGLISH for block in blocks(page, "python")]
    there = {str(path.relative_to(SCRIPTS)) for path in SCRIPTS.rglob("*.py")}
    assert {file[0] for file in files if file} == there


@pytest.mark.promise("tutorials-notebooks-made-their-pages", "train-tune-register-deploy-call")
@pytest.mark.slow
@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: page.stem)
def test_notebook_runs_and_prints_the_shown_output(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_what_it_needs(page)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    fork_scripts(monkeypatch)
    take_the_kernel_from_what_is_loaded(tmp_path, monkeypatch)
    hide_matplotlib(tmp_path / ".paceline")  # no test reads the PNG files of the sweeps
    executed = execute(shorter(notebook(page)), tmp_path)
    assert_outputs(notebook(page), executed)
    for block in blocks(page, "console"):
        # `paceline check` starts three processes that load torch, and other tests cover it.
        if not is_elsewhere(block.text) and (IS_PROOF or "paceline check" not in block.text):
            assert_prints_what_it_says(block)


#: Text in the notebook -> its replacement here: five training steps instead of thirty. The workers print the same lines.
SHORTER = {'"--epochs", type=int, default=2': '"--epochs", type=int, default=1', "[:1440]": "[:480]"}


def shorter(book: dict[str, Any]) -> dict[str, Any]:
    """The notebook, in which the model in parts trains for less long."""
    for cell in book["cells"]:
        text = "".join(cell["source"])
        if text.startswith("%%writefile parts/train.py"):
            for long, short in SHORTER.items():
                assert long in text
                text = text.replace(long, short)
            cell["source"] = text
    return book


def test_notebook_cell_with_other_output_than_the_page_is_detected() -> None:
    said = {"cells": MAKER["cells"]("```python\nprint(1)\n```\n\n```text\none 1\n```\n")}
    printed = json.loads(json.dumps(said).replace("one 1", "two 1"))
    assert_outputs(said, said)
    with pytest.raises(AssertionError):
        assert_outputs(said, printed)


def is_elsewhere(text: str) -> bool:
    """Whether a command wants the hosts or the cluster that the tutorials speak of (tests/engines/everywhere)."""
    return bool(re.search(r"\b(lab|cluster)\b", text.splitlines()[0]))


def require_what_it_needs(page: Path) -> None:
    """Skip the test, or fail it, where a package or Open MPI is not there."""
    for name in ("nbclient", "ipykernel", "torch", "sklearn", "matplotlib"):
        require_engine(name, find_spec(name))
    if 'distributed_backend="mpi"' in page.read_text():
        try:
            found = find_open_mpi(sys.executable)
        except LauncherError:
            found = None
        require_engine("Open MPI", found)


def take_the_kernel_from_what_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start kernels as a script, which is forked, and not as a module: four kernels would load all that they use."""
    found = find_spec("ipykernel_launcher")
    assert found is not None
    spec = {
        "argv": [sys.executable, found.origin, "-f", "{connection_file}"],
        "display_name": "Python 3",
        "language": "python",
    }
    write_tree(folder, {"jupyter/kernels/python3/kernel.json": json.dumps(spec)})
    monkeypatch.setenv("JUPYTER_PATH", str(folder / "jupyter"))


def execute(book: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run the notebook in this folder, by a kernel of this interpreter. Return it with the output of its cells."""
    import nbclient
    import nbformat

    node = nbformat.reads(json.dumps(book), as_version=4)
    nbclient.NotebookClient(node, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    done: dict[str, Any] = node
    return done


def assert_outputs(said: dict[str, Any], executed: dict[str, Any]) -> None:
    """Each cell that has an output on the page has printed that."""
    for before, after in zip(said["cells"], executed["cells"], strict=True):
        if expected := text_of(before):
            assert_printed(expected.splitlines(), text_of(after))


def text_of(cell: dict[str, Any]) -> str:
    """What a cell has printed."""
    texts = [output["text"] for output in cell.get("outputs", []) if output.get("name") == "stdout"]
    # The width of a column depends on its numbers, so shorten the spaces between columns to two.
    return re.sub(r"(?<=\S)  +", "  ", "".join("".join(text) for text in texts))
