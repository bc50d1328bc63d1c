"""Real installs, by uv and by pip, from wheels that the tests made."""

from __future__ import annotations

import base64
import functools
import http.server
import os
import subprocess
import sys
import threading

import pytest

from paceline.environments import venv
from paceline.environments.environment import Environment
from paceline.errors import EnvironmentBuildError, EnvironmentSpecError
from tests.environments.conftest import versions
from tests.environments.wheels import make_wheel, unpack
from tests.helpers import write_tree

pytestmark = pytest.mark.usefixtures("index")

PROJECT = """
[project]
name = "own"
version = "0.1"
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
# A minimal build backend, so that a source folder can be installed without fetching a backend.
BACKEND = """
import os, zipfile
NAME = "own-0.1"
def _wheel(folder, code):
    path = os.path.join(folder, NAME + "-py3-none-any.whl")
    with zipfile.ZipFile(path, "w") as out:
        for name, text in code.items():
            out.writestr(name, text)
        out.writestr(NAME + ".dist-info/METADATA", "Metadata-Version: 2.1\\nName: own\\nVersion: 0.1\\n")
        out.writestr(NAME + ".dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        out.writestr(NAME + ".dist-info/RECORD", "")
    return os.path.basename(path)
def build_wheel(folder, config_settings=None, metadata_directory=None):
    return _wheel(folder, {"own.py": open("own.py").read()})
def build_editable(folder, config_settings=None, metadata_directory=None):
    return _wheel(folder, {"own.pth": os.getcwd() + "\\n"})
"""


@pytest.fixture
def project(tmp_path):
    return write_tree(
        tmp_path / "a project", {"pyproject.toml": PROJECT, "backend.py": BACKEND, "own.py": "VERSION = 'first'\n"}
    )


@pytest.fixture(params=["uv", "pip"])
def installer(request, monkeypatch):
    """Each of the two in turn."""
    if request.param == "pip":
        monkeypatch.setattr(venv, "find_uv", lambda: None)
    return request.param


#: pip and uv behave alike in these tests, so `make test` uses only uv. The other tests use both.
uv_for_both = pytest.mark.parametrize("installer", ["uv", pytest.param("pip", marks=pytest.mark.proof)], indirect=True)
each_installer_and_layering = pytest.mark.parametrize(
    ("installer", "layered"),
    [
        ("uv", False),
        ("pip", True),
        pytest.param("uv", True, marks=pytest.mark.proof),
        pytest.param("pip", False, marks=pytest.mark.proof),
    ],
    indirect=["installer"],
)


@pytest.mark.promise("whole-environment-named-requires-nothing")
def test_isolated_environment_has_requested_packages_and_dependencies_only(ensure, installer):
    built, _ = ensure(pip_packages=["chained"])
    assert versions(built, "chained", "small", "heavy", "editable") == {
        **{"chained": "1.0", "small": "1.1"},
        **{"heavy": "-", "editable": "-"},
    }
    assert built.pip == ("chained==1.0", "small==1.1")


def test_isolated_environment_sees_no_path_of_the_submitter(ensure, base_python, monkeypatch):
    built, _ = ensure(pip_packages=["small"])
    shown = subprocess.run(
        [built.python, "-c", "import sys; print(*sys.path[1:], sep='\\n')"], capture_output=True, text=True, check=True
    ).stdout.split("\n")
    base_prefix = os.path.dirname(os.path.dirname(base_python))
    inside = [path for path in shown if path.startswith((base_prefix, sys.prefix))]
    assert not inside
    assert [path for path in shown if "site-packages" in path] == [str(venv.site_packages(built.prefix))]


def test_requested_package_is_installed_even_if_pythonpath_has_it(ensure, wheels, tmp_path, monkeypatch):
    write_tree(tmp_path / "shell", {"small.py": "VERSION = 'shell'"})
    write_tree(
        tmp_path / "shell" / "small-1.1.dist-info", {"METADATA": "Metadata-Version: 2.1\nName: small\nVersion: 1.1\n"}
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "shell"))
    built, _ = ensure(pip_packages=["small"])
    assert versions(built, "small") == {"small": "1.1"}


@pytest.mark.promise("layer-sees-interpreter-installed-again")
@uv_for_both
def test_layered_environment_sees_base_and_editable_packages(ensure, installer):
    built, _ = ensure(pip_packages=["beside-heavy"], layered=True)
    assert versions(built, "beside_heavy", "heavy", "small", "editable") == {
        **{"beside_heavy": "1.0", "heavy": "2.0"},
        **{"small": "1.0", "editable": "1.0"},
    }
    assert built.pip == ("beside-heavy==1.0",)


@pytest.mark.promise("layer-sees-interpreter-installed-again")
def test_layered_environment_does_not_reinstall_base_packages(ensure):
    built, said = ensure(pip_packages=["heavy", "small>=1", "Editable==1.0"], layered=True)
    assert built.pip == ()
    assert said == ["the base has all that is asked for: nothing is installed"]


def test_newer_version_in_a_layered_environment_overrides_the_base(ensure, installer):
    built, said = ensure(pip_packages=["heavy>=3"], layered=True)
    assert (installer == "uv") is not any("pip installs" in line for line in said)
    assert built.pip == ("heavy==3.0",)
    assert versions(built, "heavy", "small") == {"heavy": "3.0", "small": "1.0"}


@uv_for_both
def test_newer_version_required_by_a_package_is_installed_into_the_layered_environment(ensure, installer):
    built, said = ensure(pip_packages=["modern"], layered=True)
    assert (installer == "uv") is not any("pip installs" in line for line in said)
    assert built.pip == ("heavy==3.0", "modern==1.0")
    assert versions(built, "heavy", "modern") == {"heavy": "3.0", "modern": "1.0"}


def test_extra_of_a_package_installs_only_packages_missing_from_the_base_interpreter(ensure, base_python):
    built, _ = ensure(pip_packages=["optional[more]"], layered=True)
    assert built.pip == ("chained==1.0", "optional==1.0", "small==1.1")


def test_extra_of_a_base_package_does_not_reinstall_it(store, wheels, tmp_path):
    prefix = tmp_path / "base"
    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", prefix], check=True)
    unpack(wheels / "optional-1.0-py3-none-any.whl", next(prefix.glob("lib/*/site-packages")))
    asked = Environment(pip_packages=["optional[more]"], layered=True)
    built = store.ensure(asked, str(prefix / "bin" / "python"), print)
    assert built.pip == ("chained==1.0", "small==1.1")


def test_conflict_with_a_base_package_is_warned_about(store, wheels, tmp_path):
    prefix = tmp_path / "base"
    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", prefix], check=True)
    site_packages = next(prefix.glob("lib/*/site-packages"))
    unpack(make_wheel(tmp_path, "picky", "1.0", ["heavy<3"]), site_packages)
    unpack(wheels / "heavy-2.0-py3-none-any.whl", site_packages)
    unpack(wheels / "small-1.0-py3-none-any.whl", site_packages)
    said = []
    store.ensure(Environment(pip_packages=["heavy==3.0"], layered=True), str(prefix / "bin" / "python"), said.append)
    assert "warning: picky of the base requires heavy<3, and the layer has 3.0" in said


def test_environment_on_a_venv_with_system_site_packages_sees_user_site_packages(
    store, tmp_path, wheels, base_python, monkeypatch
):
    prefix = tmp_path / "base"
    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", "--system-site-packages", prefix], check=True)
    user = tmp_path / "user"
    monkeypatch.setenv("PYTHONUSERBASE", str(user))
    site_packages = next(prefix.glob("lib/*/site-packages"))
    version = site_packages.parent.name
    unpack(wheels / "heavy-2.0-py3-none-any.whl", user / "lib" / version / "site-packages")
    unpack(wheels / "small-1.0-py3-none-any.whl", site_packages)
    built = store.ensure(
        Environment(pip_packages=["beside-heavy"], layered=True), str(prefix / "bin" / "python"), print
    )
    assert built.pip == ("beside-heavy==1.0",)
    assert versions(built, "heavy", "small") == {"heavy": "2.0", "small": "1.0"}


def test_base_package_that_violates_a_constraint_is_replaced_in_a_layered_environment(ensure, installer):
    built, _ = ensure(pip_packages=["small"], pip_constraints=["small>=1.1"], layered=True)
    assert built.pip == ("small==1.1",)


def test_constraint_without_a_requirement_installs_nothing(ensure):
    built, _ = ensure(pip_packages=["small"], pip_constraints=["small<1.1", "heavy==2.0"])
    assert built.pip == ("small==1.0",)


def test_requirement_with_a_false_marker_is_skipped(ensure):
    built, _ = ensure(pip_packages=["small==1.0", "nowhere; sys_platform == 'win32'", "for-windows"])
    assert built.pip == ("for-windows==1.0", "small==1.0")


@each_installer_and_layering
def test_a_source_folder_with_a_blank_in_its_name_is_installed(ensure, project, installer, layered):
    built, _ = ensure(pip_packages=[str(project)], layered=layered)
    assert versions(built, "own") == {"own": "first"}
    assert built.locked.locked_pip == (f"own @ {project.as_uri()}",)


@each_installer_and_layering
def test_editable_folder_is_used_in_place(ensure, project, installer, layered):
    built, _ = ensure(pip_packages=[f"-e {project}"], layered=layered)
    (project / "own.py").write_text("VERSION = 'second'\n")
    assert versions(built, "own") == {"own": "second"}
    assert built.locked.locked_pip == (f"-e {project}",)


def test_changed_source_folder_makes_a_new_environment_unless_editable(ensure, project):
    copied, _ = ensure(pip_packages=[str(project)])
    linked, _ = ensure(pip_packages=[f"-e {project}"])
    (project / "own.py").write_text("VERSION = 'second-longer'\n")
    again, _ = ensure(pip_packages=[str(project)])
    assert again.key != copied.key
    assert versions(again, "own") == {"own": "second-longer"}
    assert ensure(pip_packages=[f"-e {project}"])[0].key == linked.key


@uv_for_both
@pytest.mark.parametrize("form", ["{}[more]", "-e {}[more]", "own[more] @ file://{}"], ids=["path", "editable", "url"])
def test_version_pinned_by_an_extra_of_a_local_folder_is_installed_into_the_layered_environment(
    ensure, tmp_path, form, installer
):
    # Regression: if the base environment had another version of the package, the run imported this version without a
    # warning.
    backend = BACKEND.replace(
        "Version: 0.1\\n", "Version: 0.1\\nProvides-Extra: more\\nRequires-Dist: small==1.1; extra == 'more'\\n"
    )
    assert backend != BACKEND
    folder = write_tree(
        tmp_path / "own", {"pyproject.toml": PROJECT, "backend.py": backend, "own.py": "VERSION = 'first'\n"}
    )
    built, _ = ensure(pip_packages=[form.format(folder)], layered=True)
    assert versions(built, "own", "small") == {"own": "first", "small": "1.1"}


def test_a_wheel_named_by_its_path_is_installed(ensure, tmp_path):
    wheel = make_wheel(tmp_path / "with blank", "handmade", "4.0", ["small"])
    built, _ = ensure(pip_packages=[str(wheel)], layered=True)
    assert built.pip == ("handmade==4.0",)
    assert versions(built, "handmade") == {"handmade": "4.0"}


def test_console_script_of_an_installed_package_runs(ensure):
    built, _ = ensure(pip_packages=["small==1.1"])
    done = subprocess.run([built.bin_dir / "small-says"], capture_output=True, text=True, check=True)
    assert done.stdout == "small says\n"


def test_requirements_option_unsupported_by_uv_selects_pip_as_installer(ensure, wheels):
    built, said = ensure(pip_requirements="--prefer-binary\nsmall\n")
    assert said[0] == "pip's setting prefer-binary has no counterpart in uv: pip installs"
    assert built.pip == ("small==1.1",)


@uv_for_both
def test_packages_are_installed_from_the_find_links_folder_of_a_requirements_file(
    ensure, tmp_path, monkeypatch, installer
):
    monkeypatch.delenv("PIP_FIND_LINKS")
    make_wheel(tmp_path / "more", "only-here", "1.0")
    (tmp_path / "requirements.txt").write_text("--find-links more\nonly-here\n")
    asked = Environment.from_pip_requirements(None, tmp_path / "requirements.txt")
    built, _ = ensure(pip_requirements=asked.pip_requirements)
    assert built.pip == ("only-here==1.0",)


@uv_for_both
def test_missing_find_links_folder_is_ignored(ensure, wheels, monkeypatch, installer):
    monkeypatch.setenv("PIP_FIND_LINKS", f"/nowhere/at/all {wheels}")
    built, _ = ensure(pip_packages=["small"])
    assert built.pip == ("small==1.1",)


def test_requirement_hashes_are_verified(ensure, wheels, installer):
    import hashlib

    right = hashlib.sha256((wheels / "small-1.1-py3-none-any.whl").read_bytes()).hexdigest()
    built, _ = ensure(pip_requirements=f"small==1.1 --hash=sha256:{right}\n")
    assert built.pip == ("small==1.1",)
    with pytest.raises(EnvironmentBuildError, match=r"(?i)small.*(hash|mismatch)|(hash|mismatch).*small"):
        ensure(pip_requirements=f"small==1.1 --hash=sha256:{'0' * 64}\n")


def test_unknown_pip_package_is_named_with_the_resolvers_reason(ensure, installer):
    with pytest.raises(
        EnvironmentBuildError, match=r"could not be built: .*nosuchpackage.*All that was printed is in '"
    ) as e:
        ensure(pip_packages=["nosuchpackage==9.9"])
    assert "Traceback" not in str(e.value)


def test_conflicting_package_versions_are_named_in_the_error(ensure, installer):
    with pytest.raises(EnvironmentBuildError, match=r"chained.*small") as caught:
        ensure(pip_packages=["chained", "small<1.1"])
    assert len(str(caught.value)) < 1500


def test_failed_build_of_a_source_folder_shows_its_error(ensure, project, installer):
    (project / "backend.py").write_text("def build_wheel(*a, **k):\n    raise RuntimeError('no compiler here')\n")
    with pytest.raises(EnvironmentBuildError, match="no compiler here"):
        ensure(pip_packages=[str(project)])


@pytest.mark.promise("password-index-s-address-shows")
def test_a_secret_of_a_find_links_url_shows_nowhere(ensure, store, monkeypatch, installer):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_TIMEOUT", "2")
    monkeypatch.setenv("PIP_INDEX_URL", "http://somebody:hunter2secret@127.0.0.1:9/simple")
    said = []
    with pytest.raises(EnvironmentBuildError) as caught:
        store.ensure(Environment(pip_packages=["nosuchpackage"]), sys.executable, said.append)
    everything = "\n".join([*said, str(caught.value)])
    assert said
    assert "hunter2secret" not in everything
    for path in store._folder.rglob("*"):
        assert not path.is_file() or b"hunter2secret" not in path.read_bytes()


@uv_for_both
def test_variable_in_a_requirement_is_expanded_and_hidden_in_messages(ensure, wheels, tmp_path, monkeypatch, installer):
    wheel = make_wheel(tmp_path / "secret-folder-name", "handmade", "4.0")
    monkeypatch.setenv("PLACE", "secret-folder-name")
    built, said = ensure(pip_packages=[f"handmade @ file://{tmp_path}/${{PLACE}}/{wheel.name}"])
    assert built.pip == ("handmade==4.0",)
    assert "secret-folder-name" not in "\n".join(said)


#: The password contains all printable characters, which Paceline must encode for the URL.
PASSWORD = f"hunter2secret{''.join(map(chr, range(32, 127)))}"


@pytest.fixture
def guarded(tmp_path):
    """host:port of a server of tmp_path/"served" that wants `PASSWORD`."""
    wanted = "Basic " + base64.b64encode(f"me:{PASSWORD}".encode()).decode()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            if self.headers.get("Authorization") == wanted:
                return super().do_GET()
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="x"')
            self.end_headers()
            return None

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *args):
            pass

    (tmp_path / "served").mkdir()
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=tmp_path / "served")
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_index_password_from_a_variable_is_used_but_not_stored(
    ensure, store, base_python, guarded, tmp_path, monkeypatch, installer
):
    wheel = make_wheel(tmp_path / "served", "handmade", "4.0", ["small"])
    monkeypatch.setenv("INDEX_TOKEN", PASSWORD)
    asked = f"handmade @ http://me:${{INDEX_TOKEN}}@{guarded}/{wheel.name}"
    built, said = ensure(pip_packages=[asked])
    assert built.locked.locked_pip == (asked, "small==1.1")
    store.prune()
    again = store.ensure(built.locked, base_python, said.append)
    assert again.pip == ("handmade==4.0", "small==1.1")
    assert "hunter2secret" not in "\n".join(said)
    kept = [path for path in store._folder.rglob("*") if path.is_file() and b"hunter2secret" in path.read_bytes()]
    assert kept == []


@uv_for_both
def test_wrong_password_fails_without_being_shown(ensure, guarded, tmp_path, monkeypatch, installer):
    wheel = make_wheel(tmp_path / "served", "handmade", "4.0")
    monkeypatch.setenv("INDEX_TOKEN", "wrong-passw0rd")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(EnvironmentBuildError, match="401") as caught:
        ensure(pip_packages=[f"handmade @ http://me:${{INDEX_TOKEN}}@{guarded}/{wheel.name}"])
    assert "wrong-passw0rd" not in str(caught.value)


def test_locked_versions_are_reinstalled(ensure, store, wheels, base_python):
    built, _ = ensure(pip_packages=["chained"])
    assert built.locked.locked_pip == ("chained==1.0", "small==1.1")
    older = Environment(pip_packages=["small"], locked_pip=["small==1.0"])
    assert store.ensure(older, base_python, print).pip == ("small==1.0",)


def test_unsatisfiable_lock_is_reported_with_the_reason(ensure):
    with pytest.raises(EnvironmentBuildError, match=r"small==7"):
        ensure(pip_packages=["small"], locked_pip=["small==7"])


def test_unset_variable_in_a_requirement_is_named_in_the_error(index, ensure, monkeypatch):
    monkeypatch.delenv("PACKAGE_TOKEN", raising=False)
    with pytest.raises(EnvironmentBuildError, match=r"needs the variable PACKAGE_TOKEN, which is not set"):
        ensure(pip_requirements="small @ https://${PACKAGE_TOKEN}@example.org/small-1.0-py3-none-any.whl\n")


@pytest.mark.parametrize("value", ["-r more.txt", "--requirement=more.txt", "-c limits.txt"])
def test_requirements_file_option_in_pip_packages_is_refused_with_a_hint_at_pip_requirements_file(value):
    with pytest.raises(EnvironmentSpecError, match="is named with pip_requirements_file"):
        Environment(pip_packages=(value,))
