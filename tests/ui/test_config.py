"""Settings of the server: an address for other machines only with TLS or a proxy."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import UserError
from paceline.ui.config import UiConfig


@pytest.mark.promise("another-address-needs-tls-proxy")
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"host": "0.0.0.0"}, "--tls-cert"),
        ({"host": "192.0.2.7"}, "--proxy"),
        ({"host": ""}, "--ssh"),
        ({"host": "box.example.org"}, "--tls-cert"),
        ({"port": 70000}, "70000"),
        ({"tls_cert": "/nowhere/cert.pem"}, "go together"),
        ({"tls_cert": "/nowhere/cert.pem", "tls_key": "/nowhere/key.pem"}, "/nowhere/cert.pem"),
        ({"proxies": ("https://hub.example.org/",)}, "without https://"),
        ({"proxies": ("a b",)}, "'a b'"),
    ],
)
def test_unsafe_or_contradictory_setting_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        UiConfig(workspace="/w", **values)
    assert said in str(error.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.0.0.53"])
def test_ui_on_localhost_needs_no_further_options(host: str) -> None:
    assert UiConfig(workspace="/w", host=host).scheme == "http"


def test_ui_config_round_trips_through_json() -> None:
    config = UiConfig(workspace="/w", host="0.0.0.0", proxies=("hub.example.org",), port=0, read_only=True)
    assert UiConfig.from_json(config.to_json()) == config
    assert "hub.example.org" in config.host_names
    # Not any host name is accepted: only a certificate verifies a server's name.
    assert not config.takes_any_host
