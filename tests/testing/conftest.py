"""An environment in which the target of docs/writing-a-target.md is installed, as its readers would have it."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

import paceline
from tests.conftest import GC_THRESHOLD
from tests.docs.pages import DOCS, blocks

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = DOCS / "writing-a-target.md"
#: The Python blocks of the page: the target, and the module that tests it.
TARGET, SUITE = (block.text for block in blocks(PAGE, "python"))
FAULTS = Path(__file__).with_name("faulty_targets.py")


@pytest.fixture(scope="session")
def run_in_environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `python ...`, or a program of this environment, where the page's package is installed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Add all packages that this interpreter has, including those of .pth files.
    seen = [path for path in sys.path if Path(path).is_dir() and path != str(Path(__file__).parents[2])]
    lines = [f"import site; site.addsitedir({path!r})\n" for path in seen]
    # Collect garbage as rarely as pytest's own processes.
    lines.append(f"import gc; gc.set_threshold(*{GC_THRESHOLD})\n")
    (packages / "seen.pth").write_text("".join(lines) + f"{Path(paceline.__file__).parents[1]}\n")
    (packages / "nice_target.py").write_text(TARGET)
    (packages / "faulty_targets.py").write_text(FAULTS.read_text())
    told = tomllib.loads(blocks(PAGE, "toml")[0].text)["project"]
    kinds = told["entry-points"]["paceline.targets"] | {
        kind: f"faulty_targets:{kind.capitalize()}" for kind in ("generous", "deaf", "foreign", "forgetful", "namesake")
    }
    about = packages / f"nice_target-{told['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {told['name']}\nVersion: {told['version']}\n")
    points = "".join(f"{name} = {place}\n" for name, place in kinds.items())
    (about / "entry_points.txt").write_text(f"[paceline.targets]\n{points}")

    def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        argv = [str(folder / "bin" / "python"), *words]
        # Of the installed pytest plugins, load only the one that the page's command needs.
        plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_timeout"}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **plugins}
        return subprocess.run(
            argv, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )

    return run
