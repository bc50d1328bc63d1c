"""What the benchmarks share: two sides in turn, the machine, and the result on disk."""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

# Before anything is imported that starts threads, in this process and in every child.
os.environ["OMP_NUM_THREADS"] = "1"
# An installed package has its bytecode. Without it each program would compile what it imports, again and again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def in_turn(rounds: int, *sides: Callable[[], float]) -> list[list[float]]:
    """Call the sides one after the other, again and again; the figures of each, without those of a first round."""
    figures: list[list[float]] = [[] for _ in sides]
    for number in range(rounds + 1):
        for place, side in enumerate(sides):
            figure = side()
            if number > 0:
                figures[place].append(figure)
    return figures


def seconds_to_marks(marks: Path, command: list[str], **options: Any) -> float:
    """Seconds from the start of `command` until the last of its workers has come to its first line.

    marks: a folder, in which each worker leaves a file with the time (`repr(time.time())`). options: of `subprocess.run`.
    """
    marks.mkdir(exist_ok=True)
    for mark in marks.iterdir():
        mark.unlink()
    before = time.time()
    subprocess.run(command, check=True, capture_output=True, **options)
    return max(float(mark.read_text()) for mark in marks.iterdir()) - before


def mlflow_interpreter(description: str) -> str | None:
    """What a script's one option, `--mlflow-python`, names: the interpreter of an environment that has MLflow."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--mlflow-python", help="interpreter of an environment that has MLflow")
    python: str | None = parser.parse_args().mlflow_python
    if python is None:
        return None
    # Absolute, not resolved: an environment's interpreter is a link. The command in the result names no folders.
    sys.argv[sys.argv.index(python)] = os.path.basename(python)
    return os.path.abspath(python)


def median(figures: Sequence[float]) -> float:
    return statistics.median(figures)


def program(name: str) -> str:
    """A program of this interpreter's environment."""
    return str(Path(sys.executable).parent / name)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for the benchmark alone, in which workspace and leases lie; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        os.environ["PACELINE_WORKSPACE"] = f"{name}/workspace"
        os.environ["PACELINE_LEASES"] = f"{name}/leases"
        yield Path(name)


def report(name: str, measure: str, target: str, met: bool, **figures: Any) -> None:
    """Print the result and write it to `results/<name>.json`."""
    result = {
        "measure": measure,
        "target": target,
        "met": met,
        **figures,
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%d"),
        "hardware": hardware(),
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    shown = ", ".join(f"{key} {_text(value)}" for key, value in figures.items() if isinstance(value, (int, float)))
    print(f"{'met   ' if met else 'MISSED'} {measure}: {shown} (target: {target})", flush=True)


def hardware() -> dict[str, Any]:
    model = "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory, 1),
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
    }


def _text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
