"""azureml check, install, uninstall: programs for the Azure ML SDK."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

from paceline.cli.common import print_json
from paceline.cli.options import JSON, VerbOption, takes
from paceline.compat.azureml import everywhere
from paceline.compat.azureml.check import findings
from paceline.errors import UserError
from paceline.runs.visible import visible_line


@takes(
    VerbOption("path", "A folder, a Python file or a notebook.", "PATH", Path, default=Path()),
    VerbOption("--all", "Show names that work unchanged, too.", type=bool, name="show_all"),
    JSON,
)
def check(*, path: Path, show_all: bool, as_json: bool) -> int:
    """Check which names of the Azure ML SDK in these files run here.

    Reads drivers (programs that submit runs) and training scripts without running them. Finds methods of a variable too, if the
    text shows the variable's class. Exits with 1 if a name is missing.
    """
    if not path.exists():
        raise UserError(f"there is no {str(path)!r}. Name a folder, a Python file or a notebook.")
    found = findings.of_folder(path)
    counts = Counter(one.becomes for one in found)
    if as_json:
        print_json({"uses": [dataclasses.asdict(one) for one in found], "counts": dict(counts)})
        return int(bool(counts[findings.MISSING]))
    for one in found:
        if show_all or one.becomes != findings.WORKS:
            print(
                visible_line(f"{one.file}:{one.line}: {one.name}: {one.becomes}{f': {one.text}' if one.text else ''}")
            )
    if not found:
        print("No name of azureml is used there.")
        return 0
    print(
        f"{len(found)} uses: {counts[findings.WORKS]} work as written, {counts[findings.REPLACED]} with something else in "
        f"place of missing names, {counts[findings.MISSING]} need an edit."
    )
    return int(bool(counts[findings.MISSING]))


def install() -> None:
    """Make `import azureml` find Paceline in this environment.

    Adds two small files to the environment's packages, ahead of the real SDK. `paceline azureml uninstall` removes them.
    """
    print(f"import azureml finds Paceline's names in every program of this environment: {everywhere.install()}")


def uninstall() -> None:
    """Remove the files that `paceline azureml install` has added."""
    folders = everywhere.uninstall()
    for folder in folders:
        print(f"Removed from {folder}")
    if not folders:
        print("Nothing was installed there.")


verbs = {"check": check, "install": install, "uninstall": uninstall}
