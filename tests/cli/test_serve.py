"""`paceline serve`: a model in the foreground, and its trial."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time

import httpx
import pytest

from tests.cli.conftest import Cli
from tests.environments.wheels import make_wheel
from tests.helpers import write_tree

SCRIPT = """
import os
def init():
    global text
    text = open(os.path.join(os.environ["AZUREML_MODEL_DIR"], "model", "m.txt")).read()
def run(data):
    return text
"""
PATIENCE_S = 120.0


@pytest.fixture
def registered(cli: Cli) -> Cli:
    """A workspace with version 1 of the model `digits`, and a script beside it. Temporary files lie in `tmp`."""
    (cli.folder / "tmp").mkdir()
    cli.environment["TMPDIR"] = str(cli.folder / "tmp")
    write_tree(cli.folder, {"model/m.txt": "the model", "src/score.py": SCRIPT, "sample.json": "[1]"})
    cli("model", "register", "digits", "model")
    return cli


def left(cli: Cli) -> list[str]:
    return [path.name for path in (cli.folder / "tmp").iterdir()]


def test_a_registered_model_is_served_until_ctrl_c(registered: Cli) -> None:
    words = registered.argv("serve", "digits:1", "--entry", "src/score.py", "--port", 0)
    with subprocess.Popen(
        words, env=registered.environment, cwd=registered.folder, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            url = None
            while url is None:
                line = process.stderr.readline()
                assert line, "it has ended"
                url = (found := re.search(r"http://\S+/score", line)) and found[0]
            assert httpx.post(str(url), content="1", timeout=PATIENCE_S).json() == "the model"
            assert len(left(registered)) == 1
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 130
        finally:
            process.kill()
    deadline = time.monotonic() + PATIENCE_S
    while left(registered):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_serve_check_prints_the_answer_of_the_model_or_the_error_of_its_script(registered: Cli) -> None:
    done = registered("serve", "digits", "--entry", "src/score.py", "--check", "[1]")
    assert re.fullmatch(r'script: loaded in .* s; the sample was answered 200 in .* ms:\n"the model"\n', done.stdout)
    # The registered model has the file `model/m.txt`, which the script reads. The unregistered model has it as `m.txt`,
    # so the script does not find it.
    words = ("serve", "./model", "--entry", "score.py", "--source", "src", "--check", "@sample.json", "--json")
    found = json.loads(registered(*words, code=1).stdout)
    assert found["problem"].startswith("FileNotFoundError: ")
    path = next((registered.folder / ".paceline/models/digits/1").rglob("m.txt"))
    path.chmod(0o644)
    path.write_text("the modem")
    done = registered("serve", "digits", "--entry", "src/score.py", "--check", "", code=1)
    assert "'model/m.txt' has changed since its registration" in done.stderr
    assert left(registered) == []


def test_serve_check_uses_the_environment_of_the_run_that_made_the_model(registered: Cli) -> None:
    wheel = make_wheel(registered.folder / "wheels", "small", "1.1", code="def say():\n    return 'small 1.1'\n")
    write_tree(
        registered.folder,
        {
            "train/train.py": "import os\nopen(os.path.join(os.environ['PACELINE_OUTPUT_DIR'], 'm.txt'), 'w').write('made')\n",
            "src/uses.py": "import os, small\ndef init(): pass\ndef run(data): return small.say() + os.environ.get('MORE', '')\n",
        },
    )
    run = json.loads(registered("run", "train/train.py", "--pip", wheel, "--json").stdout)["run_id"]
    registered("model", "register", "made", "outputs", "--run", run)
    words = ("serve", "made", "--entry", "src/uses.py", "--check", "[1]")
    done = registered(*words, "--env", "MORE=!")
    assert re.search(r'answered 200 in .* ms:\n"small 1.1!"\n', done.stdout)
    # The check uses the environment that the training run has built, so it installs nothing.
    assert "is ready" in done.stderr
    assert "installing" not in done.stderr
    # Check the script with another Python, which lacks the package `small`: the script fails as it would in a service.
    found = json.loads(registered(*words, "--python", sys.executable, "--json", code=1).stdout)
    assert found["problem"].startswith("ModuleNotFoundError: No module named 'small' (")
    assert found["log"].splitlines()[1].endswith('src/uses.py", line 1, in <module>')


def test_serve_refuses_invalid_options_before_it_starts_a_server(registered: Cli) -> None:
    for words, said in (
        ("", "there is nothing to serve"),
        ("nosuch", "there is no model 'nosuch'"),
        ("./nosuch", "/nosuch': there is no such file or folder. A registered model"),
        ("digits --entry nosuch.py", "--entry 'nosuch.py': there is no such file."),
        ("digits --entry src/score.py --source model", "is not below --source 'model'"),
        ("digits --source src", "--source goes with --entry"),
        ("digits --host 0.0.0.0", "so its clients need keys. Give keys (--keys FILE)"),
        ("digits --env =3", "environment variable ''"),
        ("digits --max-body much", "--max-body: 'much' is not a size"),
        ("digits --tls-cert none.pem --tls-key none.pem", "there is no such file."),
        ("digits --json", "--json goes with --check"),
        ("digits --environment nosuch", "no environment 'nosuch' is registered"),
        ("digits --isolated", "--isolated and --layered are for packages"),
        ("digits --python nosuch", "--python 'nosuch' can't be run"),
        ("digits --check nosuch.json", "--check 'nosuch.json': the sample can't be read"),
    ):
        done = registered("serve", *words.split(), code=2)
        assert said in done.stderr, (words, done.stderr)
    assert left(registered) == []
