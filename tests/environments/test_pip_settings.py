"""pip's configuration, translated for uv."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from paceline.environments import pip_settings
from paceline.environments.pip_settings import PipSettings, parse
from paceline.environments.requirements import parse as parse_requirements
from paceline.environments.venv import build_environment


def translated(listed, requirements=""):
    settings = PipSettings(values=parse(listed))
    settings.add(line for line in parse_requirements(requirements, "r.txt", None) if line.option)
    variables = settings.uv_variables()
    assert variables.pop("UV_INDEX_STRATEGY") == "unsafe-best-match"
    return variables, settings


@pytest.mark.parametrize(
    ("listed", "variables"),
    [
        ("", {}),
        ("global.index-url='https://a/simple'", {"UV_DEFAULT_INDEX": "https://a/simple"}),
        ("global.extra-index-url='https://a https://b'", {"UV_INDEX": "https://a https://b"}),
        ("global.extra-index-url='\\nhttps://a\\nhttps://b'", {"UV_INDEX": "https://a https://b"}),
        ("global.extra-index-url='https://a file:///nowhere/at/all'", {"UV_INDEX": "https://a"}),
        ("global.find-links='/ /nowhere/at/all https://b'", {"UV_FIND_LINKS": "/,https://b"}),
        ("global.find-links='/nowhere/at/all'", {}),
        ("global.cert='/c.pem'", {"SSL_CERT_FILE": "/c.pem"}),
        ("global.client-cert='/c.pem'", {"SSL_CLIENT_CERT": "/c.pem"}),
        ("global.trusted-host='a b:8080'", {"UV_INSECURE_HOST": "a b:8080"}),
        ("global.timeout='60'", {"UV_HTTP_TIMEOUT": "60"}),
        (":env:.default-timeout='180'", {"UV_HTTP_TIMEOUT": "180"}),
        ("global.timeout='0.5'", {"UV_HTTP_TIMEOUT": "1"}),
        ("global.retries='2'", {"UV_HTTP_RETRIES": "2"}),
        ("install.pre='true'", {"UV_PRERELEASE": "allow"}),
        ("install.pre='no'", {}),
        ("global.no-cache-dir='false'", {}),
        ("global.require-hashes='1'", {"UV_REQUIRE_HASHES": "1"}),
        ("global.constraint='/a.txt /b.txt'", {"UV_CONSTRAINT": "/a.txt /b.txt"}),
        ("global.only-binary=':all:'", {"UV_NO_BUILD": "1"}),
        ("global.no-binary='a,b'", {"UV_NO_BINARY_PACKAGE": "a b"}),
        ("global.keyring-provider='subprocess'", {"UV_KEYRING_PROVIDER": "subprocess"}),
        ("global.index-url='https://a'\ninstall.index-url='https://b'", {"UV_DEFAULT_INDEX": "https://b"}),
        (":env:.index-url='https://c'\ninstall.index-url='https://b'", {"UV_DEFAULT_INDEX": "https://c"}),
        ("download.index-url='https://a'\nnot a line\nglobal.index-url=broken(", {}),
        ("global.target='/elsewhere'\nglobal.user='1'\n:env:.disable-pip-version-check='1'\nglobal.quiet='3'", {}),
    ],
)
def test_pip_setting_becomes_a_variable_for_uv(listed, variables):
    found, settings = translated(listed)
    assert (found, settings.for_pip) == (variables, "")


@pytest.mark.parametrize(
    "listed",
    [
        "global.prefer-binary='1'",
        "global.some-new-setting='x'",
        "global.keyring-provider='import'",
        "global.no-deps='1'",
        "global.pre='perhaps'",
        "global.timeout='soon'",
        "global.use-feature='fast-deps other'",
        "global.only-binary=':all:,a'",
    ],
)
def test_pip_setting_unsupported_by_uv_selects_pip_as_installer_with_a_note(listed):
    _, settings = translated(listed)
    name = listed.partition(".")[2].partition("=")[0]
    assert settings.for_pip == f"pip's setting {name} has no counterpart in uv"


def test_options_of_a_requirements_file_override_the_pip_configuration(monkeypatch):
    monkeypatch.setenv("TOKEN", "t0ken")
    found, settings = translated(
        "global.index-url='https://a'\nglobal.extra-index-url='https://b'\nglobal.find-links='https://c'",
        "--index-url https://u:${TOKEN}@d/simple\n--extra-index-url https://e\n--find-links https://f\n--pre\n",
    )
    assert found == {
        "UV_DEFAULT_INDEX": "https://u:t0ken@d/simple",
        "UV_INDEX": "https://e",
        "UV_FIND_LINKS": "https://c,https://f",
        "UV_PRERELEASE": "allow",
    }
    assert "t0ken" in settings.secrets()
    assert not settings.no_index


@pytest.mark.parametrize(
    ("listed", "file"), [("global.no-index='1'", ""), ("global.index-url='https://a'", "--no-index\n")]
)
def test_no_index_setting_is_true_if_pip_configuration_or_requirements_file_disables_the_index(listed, file):
    found, settings = translated(listed, file)
    assert (found, settings.no_index) == ({}, True)


def test_passwords_and_tokens_in_pip_settings_are_recognized_as_secrets():
    assert PipSettings(values={"proxy": ["me:pass", "word@host:1"]}).secrets()[:1] == ["me:pass word"]
    settings = PipSettings(
        values=parse("global.index-url='https://me:p%40ss@a'\nglobal.extra-index-url='https://t0ken@b https://c'")
    )
    assert {"p%40ss", "p@ss", "t0ken"} <= set(settings.secrets())
    assert not {"a", "b", "https://c"} & set(settings.secrets())


@pytest.mark.promise("pip-s-own-configuration-counts")
def test_pip_configuration_file_is_read(tmp_path, monkeypatch):
    (tmp_path / "pip.conf").write_text(
        "[global]\nindex-url = https://a/simple\nextra-index-url =\n  https://b\n  https://c\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("PIP_TRUSTED_HOST", "a")
    values = pip_settings.read(build_environment()).values
    assert values["index-url"] == ["https://a/simple"]
    assert values["extra-index-url"] == ["https://b", "https://c"]
    assert values["trusted-host"] == ["a"]


def test_invalid_pip_configuration_is_reported_with_the_error_of_pip(monkeypatch, tmp_path):
    (tmp_path / "pip.conf").write_text("index-url = no section\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    assert pip_settings.read(build_environment()).for_pip.startswith("`pip config list` fails")


def test_pip_is_not_started_without_a_configuration(monkeypatch, tmp_path):
    monkeypatch.setattr(pip_settings.os.path, "exists", lambda path: False)
    monkeypatch.setattr(pip_settings.processes, "said_by", None)
    assert pip_settings.read({"HOME": str(tmp_path)}) == PipSettings()


def test_pip_environment_variables_give_the_settings_of_pip_config_list_without_starting_pip(monkeypatch):
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    for name, value in {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "https://a/simple",
        "PIP_EXTRA_INDEX_URL": "https://b\nhttps://c",
        "PIP_DEFAULT_TIMEOUT": "20",
        "PIP_NO_INDEX": "",
    }.items():
        monkeypatch.setenv(name, value)
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    monkeypatch.setattr(pip_settings.processes, "said_by", None)
    values = pip_settings.read(os.environ).values
    assert values == parse(listed.stdout)
    assert values["extra-index-url"] == ["https://b", "https://c"]


def test_environment_variables_such_as_pip_target_and_pythonpath_are_removed_for_builds(monkeypatch):
    for name in ("PIP_TARGET", "PIP_USER", "UV_PYTHON", "UV_SYSTEM_PYTHON", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME"):
        monkeypatch.setenv(name, "x")
        assert name not in build_environment()
