"""Settings of a Ray target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import TargetError
from paceline.targets.ray.settings import RaySettings, read_settings, token


def settings(**values: Any) -> RaySettings:
    return read_settings("cluster", values)


def test_trailing_slash_of_the_address_is_ignored() -> None:
    assert settings(address="http://head:8265/").address == "http://head:8265"


def test_automatic_ray_address_is_resolved_as_by_the_ray_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings().address == "http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")  # an address inside the cluster
    assert settings().address == "http://127.0.0.1:8265"
    monkeypatch.setenv("RAY_ADDRESS", "https://ray.example.org/cluster")
    assert settings().address == "https://ray.example.org/cluster"


@pytest.mark.parametrize("address", ["ray://head:10001", "head:6379", "http://", "http://head:8265?x=1", "file:///etc"])
def test_address_that_is_no_dashboard_url_is_refused(address: str) -> None:
    with pytest.raises(TargetError, match="not a URL of a Ray dashboard"):
        settings(address=address)


def test_a_password_in_the_address_is_refused_and_not_shown() -> None:
    with pytest.raises(TargetError, match="password") as caught:
        settings(address="http://me:hush@head:8265")
    assert "hush" not in str(caught.value)


def test_http_header_with_a_secret_is_accepted_only_as_a_reference_to_a_variable() -> None:
    assert settings(headers=["X-Team: a b", "Authorization: env:LAB"]).headers == {
        "X-Team": "a b",
        "Authorization": "env:LAB",
    }
    with pytest.raises(TargetError, match="in the clear") as caught:
        settings(headers=["X-Api-Key: hush"])
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("word", ["a", "a=", "=1", "a=0", "a=x", "a=nan", "a=inf", "CPU=1"])
def test_invalid_ray_resource_is_refused(word: str) -> None:
    with pytest.raises(TargetError, match="resources has"):
        settings(resources=[word])


def test_ray_resource_name_may_have_any_characters() -> None:
    assert settings(resources=["fast disk;$(x)=0.5", "a=b=2"]).resources == {"fast disk;$(x)": 0.5, "a=b": 2.0}


def test_ray_target_with_neither_a_shared_folder_nor_a_datastore_is_refused() -> None:
    with pytest.raises(TargetError, match="needs a datastore"):
        settings(shared="no")
    assert settings().is_shared
    assert not settings(datastore="lab").is_shared
    assert settings(shared="yes", datastore="lab").is_shared


@pytest.mark.parametrize("values", [{"python": "python3"}, {"folder": "~/x"}])
def test_relative_node_path_in_the_ray_settings_is_refused(values: dict[str, str]) -> None:
    with pytest.raises(TargetError, match="not an absolute path"):
        settings(**values)


def test_zero_cpus_per_worker_is_refused() -> None:
    with pytest.raises(TargetError, match=r"cpus_per_worker=0\.0"):
        settings(cpus_per_worker=0.0)


def test_ray_token_is_read_from_the_files_and_variables_that_ray_itself_uses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert token(settings()) is None
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("home\n")
    assert token(settings()) == "home"
    (tmp_path / "other").write_text("file")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "other"))
    assert token(settings()) == "file"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "variable")
    assert token(settings()) == "variable"
    monkeypatch.setenv("LAB", "mine")
    assert token(settings(token_env="LAB")) == "mine"


def test_missing_or_malformed_token_raises(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="no LAB_TOKEN"):
        token(settings(token_env="LAB_TOKEN"))
    with pytest.raises(TargetError, match="can't be read"):
        token(settings(token_file=str(tmp_path / "none")))
    (tmp_path / "two").write_text("two words\nof hush")
    with pytest.raises(TargetError, match="holds no token") as caught:
        token(settings(token_file=str(tmp_path / "two")))
    assert "hush" not in str(caught.value)


def test_token_given_in_place_of_a_variable_name_is_refused_and_not_shown() -> None:
    with pytest.raises(TargetError, match="not shown here") as caught:
        settings(token_env="abc-123-hush")
    assert "hush" not in str(caught.value)
