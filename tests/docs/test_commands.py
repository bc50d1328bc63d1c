"""Every command of the pages on environments and data, run in the order in which it stands there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sysconfig
from pathlib import Path

import pytest

from tests.docs.pages import DOCS
from tests.environments.wheels import make_wheel
from tests.helpers import write_tree

PAGES = ("environments", "data", "containers", "partitions")


def commands(page: str) -> list[str]:
    """The `paceline` commands of a page's blocks."""
    text = (DOCS / f"{page}.md").read_text()
    return re.findall(r"^\$ (paceline .*)$", text, re.MULTILINE)


def test_there_are_commands_to_run() -> None:
    assert len(commands("environments")) >= 5
    assert len(commands("data")) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_work(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(tmp_path / "wheels", "einops", "0.8.1")
    write_tree(
        tmp_path,
        {
            "src/train.py": "import einops\nprint(einops.VERSION)\n",
            "requirements.txt": "einops\n",
            "photos/a.png": "a",
            "photos/deep/b.png": "b",
        },
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("LAB_SECRET", "not used: nothing is asked of the server")
    monkeypatch.setenv("PATH", sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"])
    for command in commands(page):
        run(command.replace("/mnt/lab", shlex.quote(str(tmp_path / "lab"))))


def run(command: str) -> None:
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
