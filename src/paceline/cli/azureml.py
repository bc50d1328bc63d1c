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
    VerbOption("--all", "Also the uses that work as they are written.", type=bool, name="show_all"),
    JSON,
)
def check(*, path: Path, show_all: bool, as_json: bool) -> int:
    """Read drivers and training scripts, without running them, and say of each name of the SDK's what becomes of it here.

    Exits with 1 where something is missing. Variables are followed where the text shows their class.
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
        f"the place of what can't be had, {counts[findings.MISSING]} need an edit."
    )
    return int(bool(counts[findings.MISSING]))


def install() -> None:
    """Let every program of this Python environment find Paceline's names as `azureml`, without a line in it.

    Before the real SDK, where that is installed. Two small files among the environment's packages; `paceline azureml uninstall`
    removes them.
    """
    print(f"import azureml finds Paceline's names in every program of this environment: {everywhere.install()}")


def uninstall() -> None:
    """Take away what `paceline azureml install` has put into this Python environment."""
    folders = everywhere.uninstall()
    for folder in folders:
        print(f"Removed from {folder}")
    if not folders:
        print("Nothing was installed there.")


verbs = {"check": check, "install": install, "uninstall": uninstall}
