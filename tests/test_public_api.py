"""What `help()` and a type checker tell of the exported names: each parameter, real types, the choices there are."""

from __future__ import annotations

import dataclasses
import doctest
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline import checkpoint, parallel
from paceline.services.record import ServingOptions
from paceline.serving.config import ServerConfig

#: Methods that Paceline calls itself. Exported classes have them, and a user's own policy may define some.
OWN_CALLS = {
    *(
        "at_most",
        "destination",
        "entry",
        "from_json",
        "judge",
        "make_experiment",
        "make_model",
        "models_of",
        "next",
        "open_dataset",
    ),
    *(
        "job_json",
        "state_json",
        "with_state",
        "planned",
        "resized",
        "spec",
        "stops",
        "to_json",
        "told",
        "waits",
        "Pipeline.submit",
        "Sweep.submit",
    ),
}
#: Parameters that take values of any type: arguments of a script, batches, JSON, overrides and settings.
ANYTHING = {
    *(
        "arguments",
        "batch",
        "command",
        "datasets",
        "default_value",
        "git",
        "hang",
        "inputs",
        "loader",
        "loss",
        "loss_weight",
    ),
    *(
        "options",
        "overrides",
        "owner",
        "pipeline",
        "pipeline_parameters",
        "points",
        "sample",
        "script_params",
        "space",
        "split",
    ),
    *("step", "sweep", "tags", "trial", "value", "datastore"),
}
#: Calls that return values of any type: JSON, a pandas frame, or a dict of what a script logged or an environment has.
RETURNS_ANYTHING = {
    *("Job.shown", "Pipeline.parameters", "Run.get_environment", "Run.get_metrics", "Run.input_datasets"),
    *("Run.output_datasets", "Service.run", "Step.parameters", "SweepRun.best_point", "SweepRun.lineage"),
    *("SweepRun.trial_rows", "SweepRun.trials", "PipelineRun.step_rows", "Workspace.datasets"),
}


def functions() -> Iterator[tuple[str, Any, str]]:
    """Yield name, function and its docstring, for each exported function and each method of an exported class."""
    for name in paceline.__all__:
        found = getattr(paceline, name)
        if inspect.isfunction(found):
            yield name, found, found.__doc__ or ""
        if not inspect.isclass(found):
            continue
        for method, _ in inspect.getmembers(found):
            raw = inspect.getattr_static(found, method)
            function: Any = getattr(raw, "__func__", getattr(raw, "fget", raw))
            if not inspect.isfunction(function) or not function.__module__.startswith("paceline"):
                continue
            if method == "__init__":
                # The docstrings of a class and of its base classes together describe its parameters.
                yield f"{name}.__init__", function, "".join(each.__doc__ or "" for each in found.__mro__)
            elif method[0] != "_" and not {method, f"{name}.{method}"} & OWN_CALLS:
                yield f"{name}.{method}", function, function.__doc__ or ""


FUNCTIONS = {name: (function, text) for name, function, text in functions()}


def parameters(name: str) -> list[inspect.Parameter]:
    found = inspect.signature(FUNCTIONS[name][0]).parameters.values()
    return [one for one in found if one.name not in ("self", "cls")]


@pytest.mark.promise("parameter-public-api-documented-real")
def test_every_parameter_of_a_public_function_is_documented() -> None:
    assert len(FUNCTIONS) > 200
    missing = [
        f"{name}({one.name})"
        for name, (_, text) in FUNCTIONS.items()
        for one in parameters(name)
        if not re.search(rf"\b{one.name}\b", text)
    ]
    assert missing == []


@pytest.mark.promise("parameter-public-api-documented-real")
def test_public_parameters_and_results_are_not_annotated_as_any() -> None:
    found = []
    for name, (function, _) in FUNCTIONS.items():
        found += [f"{name}({one.name})" for one in parameters(name) if is_any(one) and one.name not in ANYTHING]
        returned = str(inspect.signature(function).return_annotation)
        if re.search(r"\bAny\b", returned) and not any(
            name.endswith(each.partition(".")[2]) for each in RETURNS_ANYTHING
        ):
            found.append(f"{name} -> {returned}")
    assert found == []


def is_any(one: inspect.Parameter) -> bool:
    return bool(re.search(r"\bAny\b", str(one.annotation)))


@pytest.mark.promise("parameter-public-api-documented-real")
@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        *(
            (f"{kind}.__init__", one)
            for kind in ("Estimator", "PyTorch", "TensorFlow")
            for one in ("distributed_backend",)
        ),
        *((f"{kind}.__init__", one) for kind in ("PyTorch", "SKLearn", "Job") for one in ("gpu_visibility", "on_hang")),
        *(("DataReference.as_partition", "by"), ("PipelineData.as_partition", "by"), ("Service.regen_key", "key")),
        *(("parallelize", "precision"), ("parallelize", "check"), ("parallelize", "strategy")),
        *(("DataParallel.__init__", "batch_norm"), ("PipelineParallel.__init__", "schedule")),
        *(("Sweep.__init__", "goal"), ("Sweep.__init__", "controller")),
    ],
)
def test_parameter_with_fixed_choices_is_annotated_as_a_literal(name: str, parameter: str) -> None:
    function: Any = FUNCTIONS[name][0]
    told = str(inspect.signature(function).parameters[parameter].annotation)
    names = {"Backend", "GpuVisibility", "Goal", "OnHang"}
    assert "Literal" in told or names & set(re.findall(r"\w+", told)), told


@pytest.mark.parametrize("name", ["Estimator", "PyTorch", "TensorFlow", "SKLearn"])
def test_help_of_an_estimator_has_a_line_for_each_parameter(name: str) -> None:
    text = inspect.getdoc(getattr(paceline, name)) or ""
    for one in parameters(f"{name}.__init__"):
        assert re.search(rf"^    {one.name}: \S", text, re.M), one.name
    assert text.count("Args:") == 1


PROGRAM = """
import paceline as pl

ws = pl.Workspace.from_config()
exp = pl.Experiment(ws, "digits")
run = exp.submit(pl.PyTorch(entry_script="train.py", distributed_backend="gloo"))
model = run.register_model("digits")
reveal_type(run)
reveal_type(model)
reveal_type(model.run)
reveal_type(model.deploy(ws, "digits", workers=2))
reveal_type(run.metrics("loss"))
reveal_type(run.metrics())
reveal_type(exp.submit(pl.Sweep(pl.PyTorch(entry_script="t.py"), {"lr": pl.uniform(0, 1)}, metric="loss")))
pl.PyTorch(entry_script="train.py", distributed_backend="ncll")
pl.PyTorch(entry_script="train.py", on_hang="restrat")
model.deploy(ws, "digits", worker=2)
"""


@pytest.mark.promise("parameter-public-api-documented-real")
@pytest.mark.slow
@pytest.mark.proof
def test_mypy_infers_the_expected_types_in_a_program_that_uses_the_public_api(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(PROGRAM)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--no-error-summary",
            "--config-file=",
            "--cache-dir",
            tmp_path / "cache",
            "program.py",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    told = re.sub(r'"(?:paceline\.)?[\w.]*\.(?=\w+)', '"', re.sub(r"paceline\.(?:\w+\.)+", "", done.stdout))
    revealed = re.findall(r'Revealed type is "(.*)"', told)
    assert revealed == [
        "Run",
        "Model",
        "Run | None",
        "Service",
        "MetricSeries",
        "dict[str, MetricSeries]",
        "SweepRun",
    ], told
    errors = [line for line in told.splitlines() if ": error: " in line]
    assert len(errors) == 3, told


def test_every_serving_option_is_a_setting_of_the_server_config() -> None:
    assert set(ServingOptions.__annotations__) < {field.name for field in dataclasses.fields(ServerConfig)}


#: Objects that need no example of their own: results of other calls, protocols and exceptions.
SHOWN_ELSEWHERE = {
    *(
        "CheckpointError",
        "Layout",
        "Microbatch",
        "Parallel",
        "ParallelError",
        "Parts",
        "Strategy",
        "Whole",
        "WorkerError",
    ),
    *("__version__", "errors"),
}
EXAMPLES = [
    f"{home.__name__}.{name}"
    for home in (paceline, parallel, checkpoint)
    for name in home.__all__
    if name not in SHOWN_ELSEWHERE and not (home is paceline and name in parallel.__all__)
]
SCRIPTS = {
    "train.py": "import paceline\nrun = paceline.Run.get_context()\nfor step in range(3):\n    run.log('loss', 1 / (1 + step))\n",
    "broken.py": "raise ValueError('bad batch')\n",
    "iris.csv": "length,width\n5.1,3.5\n",
    "model.pt": "weights",
}


@pytest.mark.promise("parameter-public-api-documented-real")
@pytest.mark.parametrize("name", EXAMPLES)
def test_example_in_a_docstring_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file, text in SCRIPTS.items():
        (tmp_path / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    module, _, short = name.rpartition(".")
    found = doctest.DocTestFinder(recurse=False).find(
        getattr(import_module(module), short), name, globs={"pl": paceline, "paceline": paceline}
    )
    assert any(test.examples for test in found), "it has no example"
    told: list[str] = []
    doctest.DocTestRunner(verbose=False).run(found[0], out=told.append)
    assert not told, "".join(told)
