"""conda packages for real: solved and installed by py-rattler from a channel that the tests made."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import pytest

from paceline.environments import conda
from paceline.environments.environment import Environment
from paceline.errors import EnvironmentBuildError, EnvironmentSpecError
from tests.engines.conftest import require_engine
from tests.environments.channel import PLACEHOLDER, make_channel
from tests.environments.conftest import versions

pytestmark = pytest.mark.usefixtures("index")


@pytest.fixture(autouse=True)
def rattler():
    require_engine("py-rattler", find_spec("rattler"))


@pytest.fixture
def solve(ensure, channel):
    """Builds an environment of these values from the channel."""

    def build(**values):
        return ensure(conda_channels=[channel.url], **values)

    return build


def output(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, check=True, **options).stdout


@pytest.mark.promise("conda-packages-need-conda")
def test_conda_package_is_installed_with_its_dependencies_and_its_files_contain_the_install_prefix(solve):
    built, said = solve(conda_packages=["app"])
    assert built.conda == ("app=2.0=0", "hello=1.1=0")
    assert output(built.bin_dir / "hello") == f"hello again from {built.prefix}\n"
    assert "  hello 1.1 0" in said


def test_conda_prefix_placeholder_in_a_binary_file_is_replaced_and_padded(solve):
    built, _ = solve(conda_packages=["hello=1.0"])
    content = (built.prefix / "lib" / "hello.bin").read_bytes()
    assert PLACEHOLDER.encode() not in content
    assert os.fsencode(built.prefix) + b"/share\0" in content


def test_conda_python_imports_noarch_packages_and_runs_their_scripts(solve):
    built, _ = solve(conda_packages=["greet"])
    assert [each.partition("=")[0] for each in built.conda] == ["greet", "python"]
    assert output(built.bin_dir / "greet") == f"greetings from {built.prefix}\n"
    assert output(built.python, "-c", "import sys; print(sys.prefix)") == f"{built.prefix}\n"


def test_pip_packages_are_installed_into_the_conda_environment(solve):
    built, _ = solve(conda_packages=["greet"], pip_packages=["chained"])
    assert built.pip == ("chained==1.0", "small==1.1")
    assert versions(built, "chained", "heavy") == {"chained": "1.0", "heavy": "-"}
    assert output(built.python, "-c", "import greet; greet.main()") == f"greetings from {built.prefix}\n"


def test_environment_without_conda_python_uses_the_base_python(solve, base_python):
    built, said = solve(conda_packages=["app"], pip_packages=["small"])
    assert f"no Python is among the conda packages: the environment takes that of {base_python}" in said
    assert versions(built, "small", "heavy") == {"small": "1.1", "heavy": "-"}
    assert output("hello", env={"PATH": f"{built.bin_dir}:/bin:/usr/bin"}).startswith("hello again")


def test_conda_packages_without_python_can_be_added_to_the_base_interpreter(solve):
    built, _ = solve(conda_packages=["app"], pip_packages=["beside-heavy"], layered=True)
    assert built.pip == ("beside-heavy==1.0",)
    assert versions(built, "heavy") == {"heavy": "2.0"}
    assert (built.bin_dir / "hello").exists()


def test_conda_packages_that_bring_python_cannot_be_added_to_the_base_interpreter(solve, store):
    with pytest.raises(EnvironmentBuildError, match=r"bring a Python of their own \(python 3\..*Write layered=False"):
        solve(conda_packages=["greet"], layered=True)
    assert store.all() == []


def test_conda_variables_are_set_and_user_site_is_disabled(solve):
    built, _ = solve(conda_packages=["greet"])
    assert built.variables["CONDA_PREFIX"] == str(built.prefix)
    assert built.variables["PYTHONNOUSERSITE"] == "1"


def test_conda_lock_has_urls_and_hashes_and_reinstalls_the_same_packages(solve, store, base_python, channel):
    built, _ = solve(conda_packages=["greet", "hello"], pip_packages=["small"])
    assert all(url.startswith(channel.url) and len(url.partition("#")[2]) == 64 for url in built.locked.locked_conda)
    found = store.find(built.locked, base_python)
    assert found is not None
    assert found.key == built.key
    store.prune()
    # If a package is given without a version, the lock file decides the version.
    older = replace(built.locked, conda_packages=("hello", "greet"))
    again = store.ensure(older, base_python, print)
    assert again.conda == built.conda
    assert output(again.bin_dir / "greet") == f"greetings from {again.prefix}\n"


def test_older_conda_package_version_in_a_lock_is_installed_instead_of_the_newest(solve, store, base_python, channel):
    built, _ = solve(conda_packages=["hello=1.0"])
    asked = Environment(conda_packages=["hello"], conda_channels=[channel.url], locked_conda=built.locked.locked_conda)
    assert store.ensure(asked, base_python, print).conda == ("hello=1.0=0",)


def test_package_with_a_wrong_hash_is_refused(solve, store, base_python, channel, tmp_path, monkeypatch):
    monkeypatch.setenv("RATTLER_CACHE_DIR", str(tmp_path / "empty cache"))
    url = f"{channel.url}/noarch/hello-1.0-0.tar.bz2#{'0' * 64}"
    with pytest.raises(EnvironmentBuildError, match=r"hello-1\.0-0\.tar\.bz2.*hash"):
        store.ensure(Environment(conda_packages=["hello"], locked_conda=[url]), base_python, print)
    assert store.all() == []


def test_truncated_conda_package_is_refused_and_the_error_names_its_archive_file(
    store, base_python, tmp_path, monkeypatch
):
    monkeypatch.setenv("RATTLER_CACHE_DIR", str(tmp_path / "empty cache"))
    channel = make_channel(tmp_path / "channel")
    archive = channel.path("app", "2.0")
    archive.write_bytes(archive.read_bytes()[:200])
    with pytest.raises(EnvironmentBuildError, match=r"app-2\.0-0\.tar\.bz2 has another content than the channel says"):
        store.ensure(Environment(conda_packages=["app"], conda_channels=[channel.url]), base_python, print)
    assert store.all() == []


def test_unknown_conda_package_is_named(solve):
    with pytest.raises(EnvironmentBuildError, match=r"No candidates were found for nosuch >=3"):
        solve(conda_packages=["nosuch >=3"])


def test_unsatisfiable_dependency_is_named(solve):
    with pytest.raises(EnvironmentBuildError, match=r"broken 1\.0 would require nowhere-to-be-found >=3") as caught:
        solve(conda_packages=["broken"])
    assert "└" not in str(caught.value)


def test_failed_pip_package_fails_the_conda_environment(solve, store):
    with pytest.raises(EnvironmentBuildError, match="nosuchpackage"):
        solve(conda_packages=["greet"], pip_packages=["nosuchpackage"])
    assert store.all() == []


def test_conda_packages_are_installed_from_a_channel_in_a_local_folder(ensure, channel):
    built, _ = ensure(conda_packages=["app"], conda_channels=[str(channel.folder)])
    assert built.conda == ("app=2.0=0", "hello=1.1=0")


def test_first_conda_channel_has_priority(ensure, channel, tmp_path):
    older = make_channel(tmp_path / "older")
    shutil.rmtree(older.folder)
    from tests.environments.channel import Channel

    older = Channel(tmp_path / "older")
    older.add("hello", "0.9", {"share/hello.txt": b"old"})
    assert ensure(conda_packages=["hello"], conda_channels=[older.url, channel.url])[0].conda == ("hello=0.9=0",)
    assert ensure(conda_packages=["hello"], conda_channels=[channel.url, older.url])[0].conda == ("hello=1.1=0",)


def test_missing_channel_folder_is_refused_before_the_build_starts(store, base_python, tmp_path):
    asked = Environment(conda_packages=["app"], conda_channels=[(tmp_path / "nowhere").as_uri()])
    with pytest.raises(EnvironmentSpecError, match=r"there is no folder '.*nowhere'"):
        store.ensure(asked, base_python, print)
    assert not list(store._folder.glob("*.log"))


def test_conda_environment_contains_the_requested_python_version(solve):
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    built, _ = solve(conda_packages=["app"], python_version=version)
    assert f"python={'.'.join(map(str, sys.version_info[:3]))}=0" in built.conda
    with pytest.raises(EnvironmentBuildError, match=r"No candidates were found for python 3\.1\.\*"):
        solve(conda_packages=["app"], python_version="3.1")


def test_missing_rattler_names_the_install_command(store, base_python, monkeypatch):
    monkeypatch.setattr(conda.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentSpecError, match=r"pip install 'paceline\[conda\]'"):
        store.ensure(Environment(conda_packages=["app"]), base_python, print)


def test_invalid_conda_spec_is_refused_before_the_build(store, base_python):
    with pytest.raises(EnvironmentSpecError, match="which is not a conda package"):
        store.ensure(Environment(conda_packages=["app >=1.2.*.+"]), base_python, print)


def test_full_disk_raises_environment_build_error(small_disk, base_python, tmp_path, monkeypatch):
    from paceline.environments.store import EnvironmentStore
    from tests.environments.channel import Channel

    channel = Channel(tmp_path / "channel")
    channel.add("big", "1.0", {"share/big.bin": os.urandom(3_000_000)})
    store = EnvironmentStore(small_disk / "environments")
    with pytest.raises(EnvironmentBuildError, match=r"(?i)no space left on device"):
        store.ensure(Environment(conda_packages=["big"], conda_channels=[channel.url]), base_python, print)
    assert store.all() == []
