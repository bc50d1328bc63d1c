"""The worker runs a script as the interpreter itself would: most tests here compare the two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import paceline
from paceline.compat import shim_dir
from tests.helpers import write_tree

MAIN = Path(paceline.__file__).parent / "worker/__main__.py"


@dataclass
class Ended:
    code: int
    out: str
    err: str
    error: dict | None = None


def python(folder: Path, *words: str) -> Ended:
    """How a Python that starts in `folder` with these words ends."""
    environment = {**os.environ, "PYTHONPATH": str(MAIN.parents[2]), "PYTHONHASHSEED": "0", "NO_COLOR": "1"}
    environment |= {"PACELINE_RUN_DIR": str(folder.parent), "PACELINE_ATTEMPT": "1", "PACELINE_RANK": "0"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def plain(folder: Path, *words: str) -> Ended:
    return python(folder, *words)


def worker(folder: Path, *words: str) -> Ended:
    """The same as a worker, with the error file that it wrote."""
    attempt = folder.parent / "attempts/1"
    attempt.mkdir(parents=True, exist_ok=True)
    ended = python(folder, str(MAIN), "--", *words)
    file = attempt / "error_0.json"
    ended.error = json.loads(file.read_text()) if file.exists() else None
    return ended


@pytest.fixture
def work(tmp_path):
    path = tmp_path / "run/work"
    path.mkdir(parents=True)
    return path


def same(work: Path, script: str, *words: str) -> Ended:
    """What the worker makes of the script, which has to be what Python makes of it."""
    (work / "train.py").write_text(script)
    expected, found = plain(work, "train.py", *words), worker(work, "train.py", *words)
    # The last entry of sys.path is a folder with replacements for packages that are not installed.
    found.out = found.out.replace(f", {str(shim_dir())!r}]", "]")
    # The entry after Paceline's folder has the names of the Azure SDK, which come before an installed SDK.
    found.out = found.out.replace(f"{str(shim_dir().parent / 'azureml_names')!r}, ", "")
    assert (found.out, found.err, found.code) == (expected.out, expected.err, expected.code)
    return found


# --- Behaviour that equals plain Python's


def test_script_is_the_main_module(work):
    found = same(
        work,
        "import sys, __main__\n"
        "'''not a docstring'''\n"
        "print(__name__, __file__, sys.argv, sys.path, __spec__, __doc__, __package__)\n"
        "print(type(__loader__).__name__, __builtins__, globals().get('__annotations__', {}))\n"
        "print(__main__ is sys.modules['__main__'], __main__.__dict__ is globals(), sorted(vars()))\n"
        "if __name__ == '__main__': print('main')\n",
        *("--epochs", "5", "a b", "", "--", "; rm -rf /", "-h"),
    )
    assert "main" in found.out


def test_dunder_doc_is_the_docstring_of_the_script(work):
    same(work, '"""What it does."""\nprint(__doc__)\n')


def test_script_can_import_modules_from_its_own_folder(work):
    write_tree(work, {"sub/train.py": "import helper, os; print(helper.x, os.getcwd())", "sub/helper.py": "x = 1"})
    expected, found = plain(work, "sub/train.py"), worker(work, "sub/train.py")
    assert (found.out, found.err) == (expected.out, expected.err)


def test_symlinked_script_uses_the_folder_of_its_target(work):
    write_tree(work, {"real/main.py": "import helper; print(helper.x, __file__)", "real/helper.py": "x = 1"})
    (work / "train.py").symlink_to("real/main.py")
    expected, found = plain(work, "train.py"), worker(work, "train.py")
    assert (found.out, found.err) == (expected.out, expected.err)


@pytest.mark.parametrize("name", ["a b.py", "größe.py", "-x.py", "'q\".py", "$HOME.py", "new\nline.py", "=x.py"])
def test_script_with_an_unusual_name_runs(work, name):
    (work / name).write_text("import sys; print(sys.argv)")
    ended = worker(work, name, "x")
    assert (ended.out, ended.code) == (f"{[name, 'x']}\n", 0)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("", 0),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(0)", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit(-1)", 255),
        ("import sys; sys.exit('no data')", 1),
        ("raise SystemExit", 0),
        ("raise ValueError('bad batch')", 1),
        ("import os; os._exit(4)", 4),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("import os; os.abort()", -6),
        ("import threading, time; threading.Thread(target=lambda: (time.sleep(.2), print('late'))).start()", 0),
        ("import threading; threading.Thread(target=lambda: 1 / 0).start()", 0),
        ("import atexit; atexit.register(print, 'bye'); print('hello')", 0),
        ("import atexit; atexit.register(lambda: 1 / 0)", 0),
    ],
)
def test_exit_code_and_output_of_a_worker_script_equal_those_of_plain_python(work, script, code):
    (work / "train.py").write_text(script)
    expected, found = plain(work, "train.py"), worker(work, "train.py")
    assert (found.code, found.out) == (expected.code, expected.out) == (code, found.out)
    if "abort" in script:
        # A worker prints where native code has crashed.
        assert found.err.startswith("Fatal Python error: Aborted")
    elif "lambda" not in script:
        assert found.err == expected.err


@pytest.mark.parametrize(
    "script",
    [
        "def f():\n    raise ValueError('bad batch')\nf()\n",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('bad') from error\n",
        "import json\njson.loads('{')\n",
        "def f(:\n    pass\n",
        "x = 1\n  y = 2\n",
        "raise ValueError('one\\ntwo')\n",
        "class Odd(Exception):\n    def __str__(self): return 1 / 0\nraise Odd\n",
        "import helper\n",
        "print('größe', flush=True)\nassert 1 == 2, 'größe'\n",
        "import sys\nsys.excepthook = lambda *a: print('mine', a[0].__name__)\nraise ValueError\n",
    ],
)
def test_traceback_of_a_failed_script_equals_that_of_plain_python(work, script):
    (work / "helper.py").write_text("def g():\n    raise KeyError('x')\ng()\n")
    (work / "train.py").write_text(script)
    expected, found = plain(work, "train.py"), worker(work, "train.py")
    assert found.code == expected.code == 1
    assert found.out == expected.out
    assert [line for line in found.err.splitlines() if "paceline" in line] == []
    assert found.err == expected.err


def test_endless_recursion_in_a_script_is_reported_as_recursion_error(work):
    (work / "train.py").write_text("def f(n): return f(n + 1)\nf(0)\n")
    ended = worker(work, "train.py")
    assert (ended.code, ended.error["type"]) == (1, "RecursionError")
    assert ended.err.splitlines()[-1].startswith("RecursionError")


def test_failing_sys_excepthook_does_not_hide_the_exception_of_the_script(work):
    (work / "train.py").write_text("import sys\nsys.excepthook = lambda *a: 1 / 0\nraise ValueError('bad batch')\n")
    expected, found = plain(work, "train.py"), worker(work, "train.py")
    assert found.code == expected.code == 1
    for text in ("ZeroDivisionError", "ValueError: bad batch"):
        assert text in expected.err
        assert text in found.err


def test_an_interrupted_script_ends_with_130(work):
    (work / "train.py").write_text("raise KeyboardInterrupt")
    assert worker(work, "train.py").code == 130


@pytest.mark.parametrize(
    "script",
    [
        "def f(x: int) -> str: ...\nprint(f.__annotations__)\n",
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int = 1\nprint(A())\n",
        "import pickle\nclass A: pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A, A.__module__)\n",
        "import inspect\ndef f(): return 1\nprint(inspect.getsource(f))\n",
        "import warnings\nwarnings.simplefilter('always')\nwarnings.warn('old')\n",
        "import logging\nlogging.warning('x')\n",
        "x = 1\ndef f():\n    global x\n    x += 1\nf()\nprint(x, globals()['x'])\n",
        "exec('print(__name__)')\nprint(eval('__name__'))\n",
        "import runpy, sys\nprint(sys.modules['__main__'].__name__)\n",
        "import sys\nprint(sys.stdin.read() if sys.stdin else None)\n",
        "print(open(__file__).read()[:5])\n",
    ],
)
def test_script_run_by_a_worker_behaves_as_under_plain_python(work, script):
    assert same(work, script).code == 0


def test_spawned_processes_import_the_script_as_main_module(work):
    script = (
        "import multiprocessing as mp\n"
        "def square(x): return x * x\n"
        "if __name__ == '__main__':\n"
        "    with mp.get_context('spawn').Pool(1) as pool: print(pool.map(square, [1, 2, 3]))\n"
    )
    assert same(work, script).out == "[1, 4, 9]\n"


@pytest.mark.parametrize(
    "source",
    [
        b"# -*- coding: latin-1 -*-\nprint(len('\xe4'))\n",
        b"\xef\xbb\xbfprint('bom')\n",
        b"print('a')\r\nprint('b')\r\n",
        b"print('no newline')",
        "print('größe 日本')\n".encode(),
    ],
)
def test_source_encodings_are_handled_as_by_python(work, source):
    (work / "train.py").write_bytes(source)
    expected, found = plain(work, "train.py"), worker(work, "train.py")
    assert (found.out, found.code) == (expected.out, expected.code) == (found.out, 0)


def test_script_that_is_not_utf8_fails_as_under_python(work):
    (work / "train.py").write_bytes(b"print('\xff')\n")
    assert worker(work, "train.py").code == plain(work, "train.py").code == 1


# --- User modules with names of standard modules


def test_error_report_is_written_although_the_script_folder_has_a_module_named_json(work):
    (work / "json.py").write_text("mine = True\n")
    (work / "train.py").write_text(
        "import atexit, json, sys\natexit.register(lambda: print(sys.modules['json'].mine))\nraise ValueError('bad batch')\n"
    )
    ended = worker(work, "train.py")
    assert (ended.code, ended.out, ended.error["exception"]) == (1, "True\n", "ValueError: bad batch")


@pytest.mark.parametrize(
    "name", ["report", "script", "paceline_helper", "tokenize", "linecache", "traceback", "json", "importlib_x"]
)
def test_user_module_with_a_library_name_does_not_break_the_worker(work, name):
    (work / f"{name}.py").write_text("x = 1\n")
    (work / "train.py").write_text("raise ValueError('bad batch')\n")
    ended = worker(work, "train.py")
    assert ended.code == 1
    assert "ValueError: bad batch" in ended.err
    assert ended.error["exception"] == "ValueError: bad batch"


def test_user_module_named_like_a_worker_module_is_imported(work):
    write_tree(
        work,
        {"report.py": "x = 1", "script.py": "y = 2", "train.py": "import report, script; print(report.x, script.y)"},
    )
    assert worker(work, "train.py").out == "1 2\n"


# --- Recorded errors and states


def test_exception_report_has_the_torchelastic_format(work):
    (work / "train.py").write_text("def f():\n    raise ValueError('bad batch')\nf()\n")
    error = worker(work, "train.py").error
    assert (error["exception"], error["type"], error["exit_code"]) == ("ValueError: bad batch", "ValueError", 1)
    assert error["message"]["message"] == "ValueError: bad batch"
    assert "line 2, in f" in error["message"]["extraInfo"]["py_callstack"]
    assert "paceline" not in error["message"]["extraInfo"]["py_callstack"]
    assert error["message"]["extraInfo"]["timestamp"].isdigit()


@pytest.mark.parametrize(("script", "code"), [("import sys; sys.exit(3)", 3), ("raise SystemExit('no data')", 1)])
def test_exit_code_of_a_script_is_reported(work, script, code):
    (work / "train.py").write_text(script)
    error = worker(work, "train.py").error
    assert (error["type"], error["exit_code"]) == ("SystemExit", code)


@pytest.mark.parametrize("script", ["", "import sys; sys.exit(0)", "raise SystemExit", "import os; os._exit(3)"])
def test_script_that_ends_without_an_exception_leaves_no_error_report(work, script):
    (work / "train.py").write_text(script)
    assert worker(work, "train.py").error is None


def test_exception_in_a_forked_child_does_not_fail_the_worker(work):
    (work / "train.py").write_text(
        "import os\nif os.fork() == 0: raise ValueError('child')\nos.wait()\nprint('fine')\n"
    )
    ended = worker(work, "train.py")
    assert (ended.code, ended.out, ended.error) == (0, "fine\n", None)


def test_exception_is_reported_before_exit_handlers_run(work):
    script = (
        "import atexit, glob, os\n"
        "atexit.register(lambda: print(glob.glob('../attempts/1/error_0.json')))\n"
        "raise ValueError\n"
    )
    (work / "train.py").write_text(script)
    assert worker(work, "train.py").out == "['../attempts/1/error_0.json']\n"


@pytest.mark.parametrize("script", ["import helper\n", "import sys\nprint(sys.path[0])\n"])
def test_pythonsafepath_keeps_the_folder_of_the_script_off_the_path(work, monkeypatch, script):
    if sys.version_info < (3, 11):
        pytest.skip("needs Python 3.11")
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    (work / "helper.py").write_text("print('found')\n")
    assert same(work, script).out != "found\n"


@pytest.mark.parametrize("name", ["rank.py", "task.py", "main_script.py"])
def test_horovodrun_programs_start_with_pythonsafepath(name, tmp_path, monkeypatch):
    # Regression: with PYTHONSAFEPATH, sys.path[0] is python311.zip instead of the script's folder. Each rank failed
    # with FileNotFoundError and "could not be started".
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    program = MAIN.parents[1] / "compat/horovod/runner" / name
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "python3" not in done.stderr or "FileNotFoundError" not in done.stderr
