from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

import paceline
from paceline.errors import JobError, RunFailedError, RunStateError
from paceline.functions import FunctionRun, FunctionRuns, finding
from paceline.system import detached_process
from paceline.targets import supervisors
from paceline.targets.configured import Configured, add
from paceline.workspace import Workspace
from tests.functions.helpers import module_of

TRAIN = """
@paceline.job
def train(lr, steps=1, **more):
    return {"lr": lr, "steps": steps, **more}
"""


@pytest.mark.promise("function-result-back")
def test_submitted_function_returns_its_result(tmp_path, monkeypatch):
    module = module_of(TRAIN, tmp_path, monkeypatch)
    run = module.train.submit(0.1, name="$HOME x")
    assert run.result(timeout=180) == {"lr": 0.1, "steps": 1, "name": "$HOME x"}
    assert (run.exception(), run.done()) == (None, True)
    job = run.record().job
    assert (job.entry_module, job.arguments[2:5]) == ("paceline.functions", (f"{module.__name__}:train", "--lr", "0.1"))
    again = FunctionRun.get(Workspace(tmp_path / "ws"), run.id)
    assert isinstance(again, FunctionRun)
    assert again.result()["name"] == "$HOME x"
    assert run.experiment.name == "train"


def test_third_submitted_call_uses_a_supervisor_process_that_was_started_in_advance(tmp_path, monkeypatch):
    begun = []
    start = supervisors.start
    monkeypatch.setattr(supervisors, "start", lambda *words: begun.append(start(*words)) or begun[-1])
    module = module_of(TRAIN, tmp_path, monkeypatch)
    module.train.submit(1).result(timeout=180)
    assert supervisors._ahead is None
    module.train.submit(2).result(timeout=180)
    ahead = detached_process.started[-1]
    run = module.train.submit(3)
    assert run.result(timeout=180)["lr"] == 3
    assert begun[-1] == ahead.pid
    assert ahead.wait(180) == 0


def test_arrays_and_pickled_values_are_passed_as_arguments_and_results(tmp_path, monkeypatch):
    numpy = pytest.importorskip("numpy")
    code = "@paceline.job\ndef twice(x, n): return 2 * x, n\n@paceline.job(pickle=True)\ndef same(x): return x\n"
    module = module_of(code, tmp_path, monkeypatch)
    run, other = module.twice.submit(numpy.arange(3.0), n=(1, 2)), module.same.submit({1, complex(1, 2)})
    array, n = run.result(timeout=180)
    assert (array.tolist(), n) == ([0.0, 2.0, 4.0], (1, 2))
    assert other.result(timeout=180) == {1, complex(1, 2)}
    assert (other.folder.call / "calls.pickle").stat().st_mode & 0o777 == 0o600


FAILS = """
@paceline.job
def fail(x):
    if x == "exit":
        sys.exit(0)
    if x == "vanish":
        os._exit(0)
    raise ValueError("bad lr")
"""


@pytest.mark.promise("function-result-back")
def test_exception_of_a_submitted_function_is_raised_with_its_traceback(tmp_path, monkeypatch):
    module = module_of(FAILS, tmp_path, monkeypatch)
    runs = {x: module.fail.submit(x) for x in ("raise", "exit", "vanish")}
    with pytest.raises(RunFailedError, match="ValueError: bad lr") as caught:
        runs["raise"].result(timeout=180)
    assert caught.value.report.exception == "ValueError: bad lr"
    lines = caught.value.report.traceback.splitlines()
    assert "in fail" in lines[1]
    assert "called sys.exit(0)" in str(runs["exit"].exception(timeout=180))
    assert isinstance(runs["vanish"].exception(timeout=180), RunStateError)
    assert "Completed without a result" in str(runs["vanish"].exception())


@pytest.mark.promise("failed-call-spares-others")
def test_map_returns_results_in_the_order_of_values(tmp_path, monkeypatch):
    module = module_of(TRAIN + FAILS, tmp_path, monkeypatch)
    calls = module.train.map([0.1, 0.2, 0.3], [1, 2, 3], at_once=2)
    assert isinstance(calls, FunctionRuns)
    assert [found["steps"] for found in calls.results(timeout=180)] == [1, 2, 3]
    assert len(calls.runs) == 1
    failed = module.fail.map(["raise", "vanish"], runs=2)
    assert len(failed.runs) == 2
    assert f'File "{module.__file__}", line' in str(failed[0].exception(timeout=180))
    assert "it made the calls of a map()" in str(calls.runs[0].exception())
    with pytest.raises(RunFailedError, match="bad lr"):
        failed.results(timeout=180)


def test_result_of_a_function_is_that_of_rank_0_or_of_the_requested_rank(tmp_path, monkeypatch):
    code = "@paceline.job(nodes=2)\ndef rank(x): return x + int(os.environ['RANK'])\n"
    run = module_of(code, tmp_path, monkeypatch).rank.submit(5)
    assert [run.result(timeout=180), run.result(rank=1)] == [5, 6]
    refused(run, f"rank=2: run {run.id} has rank 0 to 1", how="result", rank=2)


def test_function_without_the_decorator_is_submitted_by_a_call_of_job(tmp_path, monkeypatch):
    module = module_of("def double(x): return 2 * x\n", tmp_path, monkeypatch)
    assert paceline.job(module.double).submit(4).result(timeout=180) == 8


def test_result_raises_at_its_timeout_and_after_a_cancel(tmp_path, monkeypatch):
    code = "@paceline.job\ndef wait(x):\n    import time\n    time.sleep(600)\n"
    module = module_of(code, tmp_path, monkeypatch)
    calls = module.wait.map([1, 2])
    with pytest.raises(TimeoutError, match=r"has not ended in time\. It goes on"):
        calls[0].result(timeout=0.1)
    calls.cancel()
    with pytest.raises(RunStateError, match=r"Call 1 of run .* has no result. Run .* was canceled"):
        calls[1].result(timeout=180)


def test_function_in_the_main_script_can_be_submitted_if_the_script_has_a_main_guard(tmp_path):
    (tmp_path / "my_script.py").write_text(
        "import paceline\n@paceline.job\ndef double(x): return 2 * x\n"
        "if __name__ == '__main__':\n    print(double.submit(4).result())\n"
    )
    (tmp_path / "unguarded.py").write_text(
        "import paceline\n@paceline.job\ndef double(x): return 2 * x\nprint(double.submit(4).exception())\n"
    )
    environment = {**os.environ, "PACELINE_WORKSPACE": str(tmp_path / "ws")}
    for name, said in (("my_script.py", "8\n"), ("unguarded.py", "__name__ == '__main__'")):
        done = subprocess.run(
            [sys.executable, name],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
            timeout=180,
        )
        assert said in done.stdout


def refused(function, message, *args, how="submit", **kwargs):
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(function, how)(*args, **kwargs)


def test_submitting_a_function_with_wrong_arguments_or_options_is_refused_without_a_run(tmp_path, monkeypatch):
    module = module_of(TRAIN, tmp_path, monkeypatch)
    train = module.train
    refused(train, "train(): missing a required argument: 'lr'. Its parameters are (lr, steps=1, **more)")
    refused(train, "train(): the argument lr['a'] is a builtins.object, which can't be stored", {"a": object()})
    refused(train.options(pickle=True), "the argument lr can't be pickled", lambda: 1)
    refused(train.options(gpu=1), "no option 'gpu'. Did you mean 'gpus'?", 1)
    refused(train.options(node_count=2), "no option 'node_count'. Did you mean 'nodes'?", 1)
    monkeypatch.setenv("PACELINE_GPUS", "")
    refused(train.options(gpus=1), "gpus= with 1 worker, one GPU each, but target 'local' has no GPUs. Set gpus=0", 1)
    refused(train.options(nodes=0), "nodes=0): write an integer of 1 or more", 1)
    refused(train.options(gpus=2, processes=3), "each process has one GPU", 1)
    refused(train.options(pickle="yes"), "pickle='yes') is not a bool", 1)
    refused(train.options(max_result="big"), "'big' is not a size", 1)
    refused(train.options(source_directory=tmp_path / "ws"), "does not contain", 1)
    refused(train.options(compute_target="moon"), "no compute target 'moon'", 1)
    refused(train, "without any value", [], how="map")
    refused(train, "without any value", how="map")
    refused(train, "lists of [1, 2] values", [1], [1, 2], how="map")
    refused(train, "map(at_once=0)", [1], how="map", at_once=0)
    refused(train.options(nodes=2), "Submit each call: [train.submit(value) for value in values]", [1], how="map")
    refused(train.options(gpus=1), "write at_once=", [1], how="map")
    monkeypatch.setattr(finding, "loading", "train")
    refused(train, "below `if __name__ == '__main__':`", 1)
    assert not (tmp_path / "ws" / "runs").exists() or os.listdir(tmp_path / "ws" / "runs") == []


def test_submitting_a_function_whose_own_name_is_bound_to_another_object_is_refused(tmp_path, monkeypatch):
    module = module_of(TRAIN + "other = train\ntrain = None\n", tmp_path, monkeypatch)
    refused(module.other, "has another 'train'", 1)


def test_function_of_an_installed_package_is_refused(tmp_path, monkeypatch):
    module = module_of(TRAIN, tmp_path, monkeypatch)
    monkeypatch.setattr("sysconfig.get_path", lambda key: str(tmp_path / "source"))
    refused(module.train, "is in the installed package", 1)


def test_worker_imports_a_submitted_function_of_a_package_by_its_full_package_name(tmp_path, monkeypatch):
    package = tmp_path / "source" / "deep" / "er"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "jobs.py").write_text(
        "import paceline\nfrom deep.er import __name__ as name\n@paceline.job\ndef where(): return name\n"
    )
    module = module_of("from deep.er.jobs import where\n", tmp_path, monkeypatch)
    assert module.where.submit().result(timeout=180) == "deep.er"
    moved = module.where.options(source_directory=tmp_path)
    (tmp_path / ".gitignore").write_text("ws\n")
    assert moved.submit().result(timeout=180) == "deep.er"


def test_map_on_slurm_submits_an_array_with_a_run_for_each_call(tmp_path, monkeypatch):
    module = module_of(TRAIN, tmp_path, monkeypatch)
    add(tmp_path / "ws", Configured(name="cluster", kind="slurm"))
    asked = {}

    def start_supervisors(self, job, run_dirs, library_dir, python, at_once):
        asked.update(names=[path.name for path in run_dirs], at_once=at_once)

    monkeypatch.setattr("paceline.targets.slurm.target.SlurmTarget.check", lambda self, job: None)
    monkeypatch.setattr("paceline.targets.slurm.target.SlurmTarget.start_supervisors", start_supervisors)
    calls = module.train.options(compute_target="cluster").map([0.1, 0.2, 0.3], at_once=2)
    assert [name.rpartition("_")[2] for name in asked["names"]] == ["0", "1", "2"]
    assert asked["at_once"] == 2
    assert [run.id for run in calls.runs] == asked["names"]
    assert [run.folder.path.joinpath("job.json").exists() for run in calls.runs] == [True] * 3
    with pytest.raises(JobError, match="an array has at most 1,000"):
        module.train.options(compute_target="cluster").map(range(1001))
