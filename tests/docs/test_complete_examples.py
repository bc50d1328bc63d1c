"""The complete examples of pages, as a reader types them: the page alone, an empty folder."""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from paceline.errors import LauncherError
from paceline.launchers.mpi import find_open_mpi
from tests.docs.pages import DOCS, blocks
from tests.docs.test_docs import assert_prints_what_it_says

PAGES = ("concepts", "from-horovod", "from-torchrun", "from-submitit", "from-ray-train")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_example_of_a_page_runs_as_it_stands(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [block.text for block in blocks(DOCS / f"{page}.md", "python")]
    commands = [block.text for block in blocks(DOCS / f"{page}.md", "console")]
    assert programs
    assert commands
    needs = [name for name in ("torch",) if page != "from-submitit" and find_spec(name) is None]
    if any("mpi" in command or "horovodrun" in command for command in commands):
        try:
            find_open_mpi(sys.executable)
        except LauncherError:
            needs.append("Open MPI")
    if needs:
        pytest.skip(f"the example needs {', '.join(needs)}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for text in programs:
        name = text.partition("\n")[0].removeprefix("# ")
        Path(name).write_text(text)
    printed = [assert_prints_what_it_says(text) for text in commands]
    if page == "concepts":  # "The loss is the same, to the last digit that is shown"
        assert len({re.search(r"loss ([\d.]+)", text)[1] for text in printed}) == 1
