"""A trial of a model before it is served: one sentence on its fault."""

from __future__ import annotations

import sys

import pytest

from paceline.serving.check import check
from paceline.serving.config import ServedModel, ServerConfig


def config(tmp_path, script: str, **values) -> ServerConfig:
    (tmp_path / "score.py").write_text(script)
    return ServerConfig(name="svc", entry_script="score.py", source_dir=str(tmp_path), **values)


def test_serve_check_succeeds_for_a_script_that_answers(tmp_path):
    script = "def predict(x: list[float]) -> float:\n    print('asked')\n    return sum(x)\n"
    found = check(config(tmp_path, script), b'{"x": [1, 2]}')
    assert (found.problem, found.kind, found.status, found.answer) == (None, "typed script", 200, "3.0")
    assert found.log == "asked\n"
    found = check(config(tmp_path, script))
    assert (found.problem, found.status) == (None, None)
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["score.py"]


@pytest.mark.promise("trial-says-one-sentence-wrong")
@pytest.mark.parametrize(
    ("script", "sample", "values", "problem"),
    [
        ("import nosuch", b"1", {}, "ModuleNotFoundError: No module named 'nosuch'"),
        ("def init(): 1 / 0\ndef run(d): pass", b"1", {}, "ZeroDivisionError: division by zero ("),
        ("def init(): pass\ndef run(d): return d['x']", b"1", {}, "500, for the script failed: TypeError: "),
        ("def init(): pass\ndef run(d): return {1, (2, 3j)}", b"1", {}, "500: the result[1]"),
        ("def predict(x: int): pass", b'{"x": "a"}', {}, "400: x should be a whole number, not 'a'."),
        (
            "import os\ndef init(): os._exit(3)\ndef run(d): pass",
            b"1",
            {},
            "while loading, it ended with exit code 3.",
        ),
        (
            "import os\ndef init(): pass\ndef run(d): os.kill(os.getpid(), 9)",
            b"1",
            {},
            "while answering the sample, it was ended by SIGKILL.",
        ),
        (
            "import time\ndef init(): pass\ndef run(d): time.sleep(600)",
            b"1",
            {"timeout_s": 0.5},
            "while answering the sample it took more than 0.5 s.",
        ),
        (
            "import time\ndef init(): time.sleep(600)\ndef run(d): pass",
            b"1",
            {"load_timeout_s": 0.5},
            "while loading it took more than 0.5 s.",
        ),
        ("", b"1", {"python": "/no/such/python"}, "No such file or directory: '/no/such/python'"),
        (
            "",
            b"1",
            {"models": (ServedModel(name="m", version="1", path="/no/such/model"),)},
            "there is nothing at '/no/such/model'",
        ),
    ],
    ids=["import", "init", "run", "result", "input", "exits", "killed", "hangs", "loads", "python", "model"],
)
def test_serve_check_reports_each_problem_in_one_sentence(tmp_path, script, sample, values, problem):
    found = check(config(tmp_path, script, **values), sample)
    assert found.problem is not None
    assert problem in found.problem
    assert "\n" not in found.problem


def test_service_check_runs_the_script_in_the_configured_interpreter(tmp_path):
    import venv

    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    script = "import sys\ndef init(): pass\ndef run(data): return sys.prefix\n"
    found = check(config(tmp_path, script, python=str(tmp_path / "venv" / "bin" / "python")), b"1")
    assert found.answer == f'"{tmp_path / "venv"}"'
    assert sys.prefix not in str(found.answer)
