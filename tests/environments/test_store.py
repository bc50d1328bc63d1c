"""One build for all processes that ask, also if the building processes are killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.environments import build as building
from paceline.environments.built import RECORD, Built
from paceline.environments.environment import Environment
from paceline.environments.store import EnvironmentStore
from paceline.environments.venv import site_packages
from paceline.errors import EnvironmentBuildError, EnvironmentSpecError
from tests.environments.conftest import versions
from tests.helpers import fill_disk, start_python, wait_until

pytestmark = pytest.mark.usefixtures("index")

#: This process builds an environment. It prints uv's messages and then the key.
BUILD = """
import json, sys
from pathlib import Path
from paceline.environments.environment import Environment
from paceline.environments.store import EnvironmentStore
store = EnvironmentStore(Path(sys.argv[1]))
say = lambda line: print(line, flush=True)
print("key", store.ensure(Environment.from_json(json.loads(sys.argv[3])), sys.argv[2], say).key, flush=True)
"""
SMALL = Environment(pip_packages=["small"])


def start_build(store, base_python, environment):
    return start_python(BUILD, store._folder, base_python, json.dumps(environment.to_json()))


def processes_that_name(text: str) -> list[int]:
    """Processes with this in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and text.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def test_built_environment_is_reused(store, base_python):
    assert store.find(SMALL, base_python) is None
    built = store.ensure(SMALL, base_python, print)
    said: list[str] = []
    again = store.ensure(SMALL, base_python, said.append)
    assert (again.key, said) == (built.key, [])
    assert store.find(SMALL, base_python) == again
    assert [each.key for each in store.all()] == [built.key]


def test_record_of_a_built_environment_is_equal_after_conversion_to_json_and_back(store, base_python):
    built = store.ensure(SMALL, base_python, print)
    assert Built.from_json(json.loads(json.dumps(built.to_json()))) == built
    assert built.size_bytes > 1000
    assert built.variables == {"VIRTUAL_ENV": str(built.prefix)}
    assert built.bin_dir == built.python.parent
    assert built.locked.locked_pip == ("small==1.1",)


def test_reused_environment_has_the_name_and_variables_of_the_new_request(store, base_python):
    store.ensure(replace(SMALL, name="first", environment_variables={"A": "1"}), base_python, print)
    built = store.ensure(replace(SMALL, name="second", environment_variables={"B": "2"}), base_python, print)
    assert len(store.all()) == 1
    assert (built.environment.name, built.environment.environment_variables) == ("second", {"B": "2"})
    assert (built.locked.name, built.locked.environment_variables) == ("second", {"B": "2"})


def test_store_finds_a_built_environment_by_its_locked_specification(store, base_python):
    built = store.ensure(SMALL, base_python, print)
    found = store.find(built.locked, base_python)
    assert found is not None
    assert found.key == built.key


def test_rebuilding_a_pruned_environment_from_its_lock_installs_the_same_versions(store, base_python):
    built = store.ensure(Environment(pip_packages=["small<1.1"]), base_python, print)
    store.prune()
    again = store.ensure(replace(built.locked, pip_packages=("small",)), base_python, print)
    assert again.pip == ("small==1.0",)


@pytest.mark.promise("two-runs-need-one-environment")
def test_concurrent_builds_of_one_environment_run_once(store, base_python, monkeypatch):
    asked = Environment(pip_packages=["chained"])
    builders = [start_build(store, base_python, asked) for _ in range(4)]
    outputs = [builder.communicate(timeout=180)[0] for builder in builders]
    assert all(builder.returncode == 0 for builder in builders)
    keys = {output.splitlines()[-1] for output in outputs}
    assert len(keys) == 1
    # Only one process has built the environment, so only one has uv's line about the package.
    assert sum(" + chained==1.0" in output for output in outputs) == 1


def test_waiting_for_a_concurrent_environment_build_is_reported(store, base_python, monkeypatch):
    import fcntl

    store.ensure(SMALL, base_python, print)
    key = store.all()[0].key
    store.prune()
    with open(store._folder / f"{key}.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = start_build(store, base_python, SMALL)
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "another process builds this environment; waiting for it\n"
    assert waiting.communicate(timeout=180)[0].splitlines()[-1] == f"key {key}"


def test_failed_build_keeps_its_log_but_no_environment(store, base_python):
    asked = Environment(pip_packages=["small", "nosuchpackage"])
    with pytest.raises(EnvironmentBuildError, match="nosuchpackage"):
        store.ensure(asked, base_python, print)
    assert store.all() == []
    (log,) = store._folder.glob("*.log")
    assert "nosuchpackage" in log.read_text()
    assert not (store._folder / log.stem).exists()


def test_log_of_a_failed_environment_build_is_removed_after_the_next_successful_build(
    store, base_python, wheels, monkeypatch, tmp_path
):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(EnvironmentBuildError):
        store.ensure(SMALL, base_python, print)
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    built = store.ensure(SMALL, base_python, print)
    assert not store.log_path(built.key).exists()


def killed_builds(store, base_python, environment):
    """Kill a build again and again: when its folder appears, when its interpreter appears, when uv gets the packages,
    and at moments by chance. Yields after each."""
    chance = random.Random(3)
    moments = [
        lambda: any(store._folder.glob("?" * 20)),
        lambda: any(store._folder.glob(f"{'?' * 20}/bin/python")),
        lambda: any(store._folder.glob(f"{'?' * 20}/paceline/requirements.txt")),
        lambda: any(store._folder.glob(f"{'?' * 20}/lib/*/site-packages/small*")),
        lambda: any(store._folder.glob(f"{'?' * 20}/.{RECORD}.*")),
        *[lambda: time.sleep(chance.uniform(0.1, 0.9)) or True] * 3,
    ]
    for moment in moments:
        builder = start_build(store, base_python, environment)
        deadline = time.monotonic() + 20
        while not moment() and builder.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        builder.kill()
        builder.communicate(timeout=120)
        yield


@pytest.mark.promise("build-killed-counts-nothing-done")
def test_environment_build_killed_at_any_moment_succeeds_when_it_is_repeated(store, base_python):
    asked = Environment(pip_packages=["chained"])
    for _ in killed_builds(store, base_python, asked):
        said: list[str] = []
        built = store.ensure(asked, base_python, said.append)
        assert versions(built, "chained", "small") == {"chained": "1.0", "small": "1.1"}
        assert store.find(asked, base_python) is not None
        store.prune()
        assert store.all() == []
        assert not (store._folder / built.key).exists()


def test_child_processes_of_a_killed_environment_build_end(store, base_python, tmp_path):
    hanging = tmp_path / "project that hangs"
    hanging.mkdir()
    (hanging / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n[project]\nname = "own"\nversion = "1"\n'
    )
    (hanging / "backend.py").write_text(
        "import os, time\nopen('started', 'w').write(str(os.getpid()))\ndef build_wheel(*a, **k):\n    time.sleep(60)\n"
        "def get_requires_for_build_wheel(*a):\n    time.sleep(60)\n    return []\n"
    )
    for number in (signal.SIGKILL, signal.SIGTERM):
        (hanging / "started").unlink(missing_ok=True)
        builder = start_build(store, base_python, Environment(pip_packages=[str(hanging)]))
        wait_until((hanging / "started").exists, "the build backend has started")
        builder.send_signal(number)
        builder.communicate(timeout=120)
        wait_until(lambda: not processes_that_name(f"{store._folder}/"), "uv has ended")
        backend = int((hanging / "started").read_text() or 0)
        if backend:
            try:
                os.kill(backend, signal.SIGKILL)
            except ProcessLookupError:
                pass


def test_environment_without_its_record_is_rebuilt(store, base_python):
    built = store.ensure(SMALL, base_python, print)
    (built.prefix / RECORD).unlink()
    (site_packages(built.prefix) / "heavy.py").write_text("VERSION = 'left behind'")
    assert store.find(SMALL, base_python) is None
    assert store.all() == []
    built = store.ensure(SMALL, base_python, print)
    assert versions(built, "small", "heavy") == {"small": "1.1", "heavy": "-"}


def test_environment_with_a_damaged_record_is_not_found_or_listed(store, base_python):
    built = store.ensure(SMALL, base_python, print)
    for text in ("", "{", "[]", "{}", '{"key": 3}', '"x"'):
        (built.prefix / RECORD).write_text(text)
        assert store.find(SMALL, base_python) is None, text
        assert store.all() == [], text


def test_environment_with_a_missing_interpreter_is_rebuilt(store, base_python):
    built = store.ensure(SMALL, base_python, print)
    built.python.unlink()
    built.python.symlink_to("/nowhere/python")
    assert store.find(SMALL, base_python) is None
    assert versions(store.ensure(SMALL, base_python, print), "small") == {"small": "1.1"}


def test_environments_of_a_copied_workspace_are_rebuilt_at_the_new_path(store, base_python, tmp_path):
    store.ensure(SMALL, base_python, print)
    copy = shutil.copytree(store._folder, tmp_path / "copy", symlinks=True)
    there = EnvironmentStore(copy)
    assert there.all() == []
    built = there.ensure(SMALL, base_python, print)
    assert built.prefix.parent == copy
    assert versions(built, "small") == {"small": "1.1"}


def test_an_environment_in_use_is_not_pruned(store, base_python):
    built = store.ensure(SMALL, base_python, print)
    with store.hold(built):
        assert store.prune() == []
        assert store.find(SMALL, base_python) is not None
    assert [each.key for each in store.prune()] == [built.key]


def test_taking_a_lock_on_a_pruned_environment_raises_environment_build_error(store, base_python):
    built = store.ensure(SMALL, base_python, print)
    store.prune()
    with pytest.raises(EnvironmentBuildError, match="has just been pruned"), store.hold(built):
        pass


def test_prune_keeps_recently_used_environments(store, base_python):
    old = store.ensure(SMALL, base_python, print)
    young = store.ensure(Environment(pip_packages=["heavy"]), base_python, print)
    a_day_ago = time.time() - 86400
    os.utime(store._folder / f"{old.key}.lock", (a_day_ago, a_day_ago))
    assert [each.key for each in store.prune(unused_for_s=3600, dry_run=True)] == [old.key]
    assert len(store.all()) == 2
    assert [each.key for each in store.prune(unused_for_s=3600)] == [old.key]
    assert [each.key for each in store.all()] == [young.key]


def test_using_a_built_environment_updates_its_time_of_last_use(store, base_python):
    built = store.ensure(SMALL, base_python, print)
    a_day_ago = time.time() - 86400
    os.utime(store._folder / f"{built.key}.lock", (a_day_ago, a_day_ago))
    store.ensure(SMALL, base_python, print)
    assert store.prune(unused_for_s=3600) == []


def test_prune_removes_incomplete_environments_and_unused_aliases_but_no_registered_environment(store, base_python):
    built = store.ensure(SMALL, base_python, print)
    left = store._folder / ("0" * 20)
    (left / "bin").mkdir(parents=True)
    (left / "bin").chmod(0o500)
    registered = store._folder / "registered" / "mine"
    registered.mkdir(parents=True)
    store.prune()
    assert not left.exists()
    assert not built.prefix.exists()
    assert registered.exists()
    assert list((store._folder / "aliases").iterdir()) == []


def test_environment_is_found_by_a_prefix_of_its_cache_key(store, base_python):
    built = store.ensure(SMALL, base_python, print)
    assert store.get(built.key[:6]).key == built.key
    with pytest.raises(EnvironmentSpecError, match="there is no environment 'zz'"):
        store.get("zz")
    with pytest.raises(EnvironmentSpecError, match="there is no environment ''"):
        store.get("")


def test_ambiguous_prefix_of_an_environment_cache_key_is_refused(store, base_python, monkeypatch):
    built = store.ensure(SMALL, base_python, print)
    other = replace(built, key=f"{built.key[:10]}{'0' * 10}")
    monkeypatch.setattr(store, "all", lambda: [built, other])
    with pytest.raises(EnvironmentSpecError, match="is the beginning of 2 environments"):
        store.get(built.key[:6])


def test_missing_environment_folder_lists_no_environments(store, base_python):
    assert store.all() == []
    assert store.prune() == []
    assert store.find(SMALL, base_python) is None
    assert not store._folder.exists() or not list(store._folder.glob("?" * 20))


def test_full_disk_raises_environment_build_error(small_disk, base_python):
    store = EnvironmentStore(small_disk / "environments")
    store._folder.mkdir()
    fill_disk(small_disk)
    with pytest.raises(EnvironmentBuildError, match="No space left on device") as caught:
        store.ensure(SMALL, base_python, print)
    assert "Traceback" not in str(caught.value)
    assert store.all() == []
    (small_disk / "filler").unlink()
    assert store.ensure(SMALL, base_python, print).pip == ("small==1.1",)


def test_disk_filled_during_install_raises_environment_build_error(small_disk, base_python, wheels, tmp_path):
    from tests.environments.wheels import make_wheel

    wheel = make_wheel(tmp_path / "big", "big", "1.0", files={"big_data.txt": "x" * 3_000_000})
    store = EnvironmentStore(small_disk / "environments")
    with pytest.raises(EnvironmentBuildError, match=r"(?i)no space left on device"):
        store.ensure(Environment(pip_packages=[str(wheel)]), base_python, print)
    assert store.all() == []


def test_old_python_missing_interpreter_or_user_managed_environment_is_refused_before_the_build(store, base_python):
    with pytest.raises(EnvironmentSpecError, match=r"python_version='3\.7'"):
        store.ensure(Environment(pip_packages=["small"], python_version="3.7"), base_python, print)
    with pytest.raises(EnvironmentSpecError, match="there is no interpreter '/nowhere/python'"):
        store.ensure(SMALL, "/nowhere/python", print)
    with pytest.raises(EnvironmentSpecError, match="user-managed"):
        store.ensure(Environment(user_managed=True), base_python, print)
    assert not any(store._folder.glob("*.log"))


def test_exception_in_the_output_callback_aborts_the_build(store, base_python):
    def say(line):
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        store.ensure(SMALL, base_python, say)
    assert store.all() == []
    assert processes_that_name(f"{store._folder}/") == []
    assert store.ensure(SMALL, base_python, print).pip == ("small==1.1",)


def test_requesting_an_environment_that_is_already_built_starts_no_process(store, monkeypatch):
    store.ensure(SMALL, sys.executable, print)
    monkeypatch.setattr("subprocess.Popen", None)
    monkeypatch.setattr(building, "build", None)
    assert store.ensure(SMALL, sys.executable, print).pip == ("small==1.1",)
