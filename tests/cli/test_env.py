"""`paceline env`: list, show, build and prune."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from tests.cli.conftest import Cli
from tests.environments.wheels import make_wheel
from tests.helpers import wait_until, write_tree


@pytest.fixture
def cli(tmp_path, wheels):
    """The program, for a pip that takes packages from a folder alone."""
    cli = Cli(tmp_path)
    cli.environment |= {
        **{"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)},
        "UV_CACHE_DIR": str(tmp_path / "uv cache"),
    }
    return cli


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheels")
    make_wheel(folder, "tiny-one", "1.0")
    make_wheel(folder, "tiny-two", "1.0", ["tiny-one"])
    return folder


def test_built_environment_is_listed_shown_and_pruned(cli):
    done = cli("env", "build", "--pip", "tiny-two", "--name", "mine")
    python = done.stdout.strip()
    assert "registered as 'mine', version 1" in done.stderr
    assert subprocess.run([python, "-c", "import tiny_two, tiny_one, paceline"], check=True, cwd="/").returncode == 0
    listed = cli("env", "list").stdout
    assert "pip, layered" in listed
    assert "tiny-one==1.0, tiny-two==1.0" in listed
    assert "mine, version 1: tiny-two" in listed
    (found,) = cli.json("env", "list")["environments"]
    assert found["python"] == python
    for word in ("mine", found["key"], found["key"][:8]):
        shown = cli("env", "show", word).stdout
        assert python in shown
        assert "  tiny-two==1.0" in shown
        assert cli.json("env", "show", word)["built"]["key"] == found["key"]
    assert cli("env", "prune", "--dry-run").stdout.endswith(
        f"Would remove 1 environment, {found['size_bytes'] / 1e3:.0f} kB.\n"
    )
    assert cli("env", "prune", "--unused-for", "1").stdout == "Removed 0 environments, 0 kB.\n"
    assert [each["key"] for each in cli.json("env", "prune")] == [found["key"]]
    assert not os.path.exists(python)
    assert "not with" in cli("env", "show", "mine").stdout


def test_second_build_of_an_environment_installs_nothing(cli):
    first = cli("env", "build", "--pip", "tiny-one")
    second = cli("env", "build", "--pip", "tiny-one")
    assert " + tiny-one==1.0" in first.stderr
    assert second.stderr.startswith("environment ")
    assert first.stdout == second.stdout


def test_isolated_environment_does_not_see_the_base_packages(cli):
    python = cli("env", "build", "--pip", "tiny-one", "--isolated").stdout.strip()
    done = subprocess.run([python, "-c", "import paceline"], cwd="/", capture_output=True, text=True, check=False)
    assert "No module named 'paceline'" in done.stderr
    assert "pip, whole" in cli("env", "list").stdout


def test_a_registered_environment_is_built_by_its_name(cli):
    cli("env", "build", "--pip", "tiny-one", "--name", "mine")
    cli("env", "prune")
    built = cli.json("env", "build", "mine")
    assert built["environment"]["version"] == 1
    assert built["built"]["pip"] == ["tiny-one==1.0"]


def test_includes_in_a_requirements_file_are_relative_to_that_file(cli):
    write_tree(cli.folder, {"needs/all.txt": "-r one.txt\n", "needs/one.txt": "tiny-one # small\n"})
    assert cli.json("env", "build", "--requirements", "needs/all.txt")["built"]["pip"] == ["tiny-one==1.0"]


def test_empty_workspace_has_no_environments(cli):
    assert cli("env", "list").stdout.startswith("No environments in ")
    assert cli.json("env", "list") == {"environments": [], "on_images": [], "registered": {}}
    assert cli.json("env", "prune") == []
    assert not (cli.folder / ".paceline").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["build"], "there is nothing to build"),
        (["build", "--pip", "tiny one"], "'tiny one' is not a requirement that pip can parse"),
        (["build", "--requirements", "nowhere.txt"], "nowhere.txt"),
        (["build", "nothing"], "no environment 'nothing' is registered"),
        (["build", "nothing", "--pip", "x"], "Leave the options out"),
        (["build", "--pip", "tiny-one", "--name", "a/b"], "can't be an environment's name"),
        (["show", "zz"], "there is no environment 'zz'"),
        (["build", "--pip", "https://me:hunter2@host/x.whl"], "password or a token"),
    ],
)
def test_invalid_env_command_prints_an_error_and_no_password(cli, words, message):
    done = cli("env", *words, code=2)
    assert message in done.stderr
    assert "hunter2" not in done.stderr
    assert done.stdout == ""


def test_invalid_environment_name_is_refused_before_the_build(cli):
    cli("env", "build", "--pip", "tiny-one", "--name", "a/b", code=2)
    assert cli.json("env", "list")["environments"] == []


def test_a_failed_build_says_which_package_and_why(cli):
    done = subprocess.run(
        cli.argv("env", "build", "--pip", "nosuchpackage==9"),
        env=cli.environment,
        cwd=cli.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (1, 2)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("paceline: error: the environment could not be built: Because nosuchpackage was not found")


def test_ctrl_c_ends_a_build_and_leaves_nothing(cli):
    write_tree(
        cli.folder / "slow",
        {
            "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "b"\nbackend-path = ["."]\n'
            '[project]\nname = "slow"\nversion = "1"\n',
            "b.py": "import time\nopen('started', 'w').close()\ntime.sleep(60)\n",
        },
    )
    process = cli.start("env", "build", "--pip", "./slow", start_new_session=True)
    wait_until((cli.folder / "slow" / "started").exists, "the build has started")
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert cli.json("env", "list")["environments"] == []
    assert not list((cli.folder / ".paceline" / "environments").glob("?" * 20))
