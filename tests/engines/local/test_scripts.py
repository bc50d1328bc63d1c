"""A script runs as `python script.py` would run it, and its changes of its own process do no harm to the run."""

from __future__ import annotations

from typing import Any

import pytest

import paceline as pl
from paceline.runs import states
from tests.engines.lab import KEEP, Lab, exit_codes, log_text, seen
from tests.engines.parents import BELOW_MPIRUN, BELOW_THE_SUPERVISOR


@pytest.mark.promise("script-runs-main-module-own")
@BELOW_THE_SUPERVISOR
def test_script_of_a_run_has_the_main_module_variables_of_plain_python(lab: Lab, parent: dict[str, Any]) -> None:
    script = KEEP + (
        "import helper, inspect\n"
        "from package import inner\n"
        "import __main__\n"
        "def function(): pass\n"
        "if __name__ == '__main__':\n"
        "    keep({'main': __main__.function is function, 'file': __file__, 'path': sys.path[0], 'argv': sys.argv,\n"
        "          'helper': helper.WHO, 'inner': inner.WHO, 'cwd': os.getcwd(), 'doc': __doc__, 'spec': __spec__,\n"
        "          'source': inspect.getsource(function), 'annotations': __annotations__, 'package': __package__,\n"
        "          'ours': sorted(name for name in globals() if 'paceline' in name)})\n"
    )
    files = {
        "helper.py": "WHO = 'helper'\n",
        "package/__init__.py": "",
        "package/inner.py": "from .other import WHO\n",
        "package/other.py": "WHO = 'inner'\n",
    }
    run = lab.complete('"""The doc."""\n' + script, files, script_params={"--epochs": 5}, **parent)

    found, work = seen(run), str(run.folder.work)
    assert found == {
        "main": True,
        "file": f"{work}/train.py",
        "path": work,
        "argv": ["train.py", "--epochs", "5"],
        "helper": "helper",
        "inner": "inner",
        "cwd": work,
        "doc": "The doc.",
        "spec": None,
        "source": "def function(): pass\n",
        "annotations": {},
        "package": None,
        "ours": [],
    }


def test_script_in_a_subfolder_imports_modules_of_its_own_folder(lab: Lab) -> None:
    lab.write("", {"sub/run.py": "import os, near\nprint(near.WHO, os.path.basename(os.getcwd()))\n"})
    (lab.source / "sub" / "near.py").write_text("WHO = 'near'\n")
    run = lab.experiment.submit(pl.Estimator(str(lab.source), entry_script="sub/run.py"))
    run.wait_for_completion()

    # As with `python sub/run.py`, modules are imported from the script's folder, and files are relative to the working directory.
    assert log_text(run) == "near work\n"


def test_classes_defined_in_the_script_can_be_pickled(lab: Lab) -> None:
    script = """
        import pickle
        class Model:
            weight = 3
        model = pickle.loads(pickle.dumps(Model()))
        assert type(model) is Model
        print(model.weight, Model.__module__)
    """
    assert log_text(lab.complete(script)) == "3 __main__\n"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_script_can_use_a_multiprocessing_pool_whose_processes_log_metrics(
    lab: Lab, parent: dict[str, Any], method: str
) -> None:
    # The start method `spawn` imports the script again under the name __mp_main__.
    script = f"""
        import multiprocessing as mp
        class Task:
            def __init__(self, n): self.n = n
        def work(task):
            import os, paceline
            run = paceline.Run.get_context()
            run.log("from a child", task.n)
            return task.n ** 2
        if __name__ == "__main__":
            with mp.get_context({method!r}).Pool(2) as pool:
                print(sorted(pool.map(work, [Task(1), Task(2), Task(3)])))
    """
    run = lab.complete(script, **parent)

    assert log_text(run) == "[1, 4, 9]\n"
    assert sorted(run.get_metrics(rank=0)["from a child"]) == [1, 2, 3]


@BELOW_THE_SUPERVISOR
def test_script_imports_its_own_module_if_paceline_has_a_module_of_the_same_name(
    lab: Lab, parent: dict[str, Any]
) -> None:
    # The script imports modules of its own source folder, and Paceline imports its own modules and the standard library's.
    names = "paceline worker report script select runs job plan processes errors monitor ranks cli targets launchers"
    files = {f"{name}.py": f"WHOSE = 'the source, {name}'\n" for name in [*names.split(), "json", "signal", "types"]}
    script = (
        "import report, script, job, ranks\nprint(report.WHOSE, '|', script.WHOSE, '|', job.WHOSE)\nraise ValueError\n"
    )
    run = lab.finish(script, files, **parent)

    assert log_text(run).splitlines()[0] == "the source, report | the source, script | the source, job"
    assert run.failure is not None
    assert run.failure.exception == "ValueError"


def test_paceline_is_imported_despite_a_module_of_that_name_in_the_source(lab: Lab) -> None:
    # The script gets the installed Paceline instead of its own module `paceline`, because the worker has already
    # imported Paceline.
    script = "import paceline\nprint(paceline.Run.get_context().id)\n"
    run = lab.complete(script, {"paceline.py": "WHO = 'the source'\n"})
    assert log_text(run) == f"{run.id}\n"


@BELOW_THE_SUPERVISOR
def test_script_may_close_its_standard_output(lab: Lab, parent: dict[str, Any]) -> None:
    script = """
        import os, time
        print("before", flush=True)
        os.close(1)
        os.close(2)
        time.sleep(0.3)
        open(f"outputs/after_{os.environ['PACELINE_RANK']}", "w").write("went on")
        os._exit(0)
    """
    run = lab.complete(script, **parent)

    assert log_text(run) == "before\n"
    assert (run.folder.outputs / "after_0").read_text() == "went on"


@BELOW_THE_SUPERVISOR
def test_a_failure_after_the_output_was_closed_is_reported(lab: Lab, parent: dict[str, Any]) -> None:
    run = lab.finish("import os\nos.close(1)\nos.close(2)\nraise ValueError('nobody hears me')\n", **parent)

    assert run.failure is not None
    assert run.failure.exception == "ValueError: nobody hears me"


def test_run_completes_without_waiting_for_a_forked_child_that_keeps_its_standard_output_open(
    lab: Lab, parent: dict[str, Any]
) -> None:
    script = """
        import os, time
        if os.fork() == 0:
            time.sleep(600)
        print("done")
    """
    run = lab.complete(script, **parent)

    assert log_text(run) == "done\n"
    assert set(exit_codes(run).values()) == {0}


@BELOW_THE_SUPERVISOR
def test_failed_child_process_does_not_fail_its_worker(lab: Lab, parent: dict[str, Any]) -> None:
    script = """
        import os, sys
        child = os.fork()
        if child == 0:
            sys.exit(9)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    run = lab.complete(script, **parent)

    assert log_text(run) == "9\n"
    assert run.status == states.COMPLETED


@BELOW_THE_SUPERVISOR
def test_exception_in_a_forked_child_does_not_fail_the_worker(lab: Lab, parent: dict[str, Any]) -> None:
    script = """
        import os
        child = os.fork()
        if child == 0:
            raise ValueError("in the child alone")
        os.waitpid(child, 0)
        print("went on")
    """
    run = lab.finish(script, **parent)

    assert log_text(run).splitlines()[-1] == "went on"
    assert (run.status, run.failure) == (states.COMPLETED, None)


@BELOW_MPIRUN
def test_files_that_all_ranks_write_to_outputs_at_the_same_time_are_all_kept(lab: Lab, parent: dict[str, Any]) -> None:
    script = """
        import os
        rank = os.environ["PACELINE_RANK"]
        os.makedirs("outputs/models", exist_ok=True)
        for number in range(100):
            with open(f"outputs/models/{rank}_{number}", "w") as file:
                file.write(rank)
        with open("outputs/shared", "a") as file:
            file.write(f"{rank}\\n")
        assert os.path.samefile("outputs", os.environ["PACELINE_OUTPUT_DIR"])
    """
    run = lab.complete(script, **parent)

    ranks = range(len(parent) or 1)
    expected = [f"outputs/models/{rank}_{number}" for rank in ranks for number in range(100)]
    assert [name for name in run.get_file_names() if name.startswith("outputs/")] == sorted(
        [*expected, "outputs/shared"]
    )
    assert sorted((run.folder.outputs / "shared").read_text().split()) == [str(rank) for rank in ranks]


@pytest.mark.parametrize("remove", ["os.unlink('outputs')", "shutil.rmtree(os.environ['PACELINE_OUTPUT_DIR'])"])
def test_script_may_remove_and_recreate_its_outputs_folder(lab: Lab, remove: str) -> None:
    script = f"""
        import os, shutil
        open("outputs/early", "w").write("1")
        {remove}
        os.makedirs("outputs/deep", exist_ok=True) if not os.path.islink("outputs") else os.makedirs(
            os.path.join(os.environ["PACELINE_OUTPUT_DIR"], "deep"))
        open("outputs/deep/late", "w").write("2")
    """
    run = lab.complete(script)

    assert "outputs/deep/late" in run.get_file_names()
    assert (run.folder.outputs / "deep" / "late").read_text() == "2"
    assert not run.folder.work.exists()


def test_files_that_the_script_writes_outside_the_outputs_folder_are_kept(lab: Lab) -> None:
    script = """
        import helper
        open("left.txt", "w").write("kept")
        with open("data.txt", "a") as file:
            file.write("more")
        open("log.d/inner.txt", "w").write("kept too")
    """
    run = lab.complete(script, {"helper.py": "", "data.txt": "some\n", "log.d/a": "", "sub/b": ""})

    left = {str(path.relative_to(run.folder.work)): path.read_text() for path in run.folder.work.rglob("*.txt")}
    assert left == {"left.txt": "kept", "data.txt": "some\nmore", "log.d/inner.txt": "kept too"}
    # Only changed and new files are left in the run's copy of the source. The user's source folder is unchanged.
    assert sorted(path.name for path in run.folder.work.rglob("*")) == ["data.txt", "inner.txt", "left.txt", "log.d"]
    assert (lab.source / "data.txt").read_text() == "some\n"


@pytest.mark.promise("source-copied-uncommitted-edits-included")
def test_run_uses_the_source_as_submitted_if_the_source_is_edited_later(lab: Lab) -> None:
    gate = lab.folder / "gate"
    script = f"""
        import os, time
        while not os.path.exists({str(gate)!r}):
            time.sleep(0.01)
        import helper
        print(helper.WHO, open("data.txt").read())
    """
    run = lab.submit(script, {"helper.py": "WHO = 'old'\n", "data.txt": "old"})
    lab.write("changed", {"helper.py": "WHO = 'new'\n", "data.txt": "new"})
    gate.touch()
    run.wait_for_completion()

    assert log_text(run) == "old old\n"


def test_standard_input_of_a_worker_is_empty(lab: Lab, parent: dict[str, Any]) -> None:
    assert log_text(lab.complete("import sys\nprint(repr(sys.stdin.read()))\n", **parent)) == "''\n"


def test_script_starts_with_the_default_signal_handlers(lab: Lab, parent: dict[str, Any]) -> None:
    script = """
        import signal
        print(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGTERM).name,
              signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.getsignal(signal.SIGCHLD).name)
    """
    assert log_text(lab.complete(script, **parent)) == "set() SIG_DFL True SIG_DFL\n"
