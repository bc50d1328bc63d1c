"""What the names of the Azure ML SDK cost: `from azureml.core import Run` in a worker over `from paceline import Run`, each in a
fresh interpreter that has what a worker has; and `Experiment.submit` of a ScriptRunConfig over that of Paceline's estimator."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from common import in_turn, median, report, scratch

IMPORTS, SUBMISSIONS = 30, 20

#: As the worker's entry has it, which is loaded when the script begins.
IMPORT = """
import sys, time
sys.path.insert(0, {shim!r})
import paceline.worker.script
before = time.perf_counter()
{line}
print((time.perf_counter() - before) * 1000)
"""


def imported(line: str) -> float:
    """Milliseconds of an import."""
    import paceline

    shim = str(Path(paceline.__file__).parent / "compat" / "shim" / "azureml_names")
    code = IMPORT.format(shim=shim, line=line)
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    names, native = in_turn(
        IMPORTS, lambda: imported("from azureml.core import Run"), lambda: imported("from paceline import Run")
    )
    more = median(names) - median(native)
    report(
        "azureml_import",
        "from azureml.core import Run in a worker, over from paceline import Run",
        "at most 15 ms more",
        more <= 15,
        names_ms=median(names),
        native_ms=median(native),
        more_ms=more,
    )
    with scratch() as folder:
        names, native = submissions(folder)
    more = median(names) - median(native)
    report(
        "azureml_submit",
        "Experiment.submit of a ScriptRunConfig, over that of an Estimator of Paceline's",
        "at most 10 ms more",
        more <= 10,
        names_ms=median(names),
        native_ms=median(native),
        more_ms=more,
    )


def submissions(folder: Path) -> list[list[float]]:
    """Milliseconds of the calls; each run has ended before the next is submitted."""
    import paceline as pl
    from paceline.compat.azureml.core import Environment, Experiment, ScriptRunConfig, Workspace
    from paceline.compat.azureml.core.conda_dependencies import CondaDependencies

    source = folder / "source"
    source.mkdir()
    (source / "train.py").write_text("pass\n")
    ours = pl.Experiment(pl.Workspace.from_config(), "native")
    theirs = Experiment(Workspace.from_config(), "names")

    def by_names() -> float:
        environment = Environment("e")
        environment.python.conda_dependencies = CondaDependencies.create(pip_packages=["azureml-defaults"])
        before = time.perf_counter()
        run = theirs.submit(
            ScriptRunConfig(
                str(source),
                "train.py",
                arguments=["--epochs", 3],
                compute_target="local",
                environment=environment,
            )
        )
        after = time.perf_counter()
        run.wait_for_completion()
        return (after - before) * 1000

    def by_paceline() -> float:
        before = time.perf_counter()
        run = ours.submit(pl.Estimator(source, entry_script="train.py", script_params={"--epochs": 3}))
        after = time.perf_counter()
        run.wait_for_completion()
        return (after - before) * 1000

    return in_turn(SUBMISSIONS, by_names, by_paceline)


if __name__ == "__main__":
    main()
