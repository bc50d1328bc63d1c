"""Configurations: to JSON and back, and the errors of wrong ones."""

from __future__ import annotations

import json

import pytest

from paceline.errors import ServingError
from paceline.serving.config import ServedModel, ServerConfig, read_config

MODEL = {"name": "digits", "version": "3", "path": "/m"}
SCRIPT = {"name": "svc", "entry_script": "score.py", "source_dir": "src"}


def test_server_config_round_trips_through_json():
    config = ServerConfig(
        name="svc",
        models=(ServedModel(name="digits", version="3", path="/m", hashes="/h"),),
        entry_script="score.py",
        source_dir="src",
        environment={"A": "b"},
        workers=3,
        timeout_s=1.5,
    )
    assert ServerConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "the configuration is list"),
        ({}, "lacks the key 'name'"),
        ({**SCRIPT, "worker": 2}, "no key 'worker'. There are name, models"),
        ({**SCRIPT, "name": "../x"}, "name='../x' is not a name"),
        ({**SCRIPT, "workers": 0}, "workers=0 is not a whole number of 1 or more"),
        ({**SCRIPT, "workers": True}, "workers=True"),
        ({**SCRIPT, "timeout_s": float("nan")}, "timeout_s=nan"),
        ({**SCRIPT, "timeout_s": "1"}, "timeout_s='1'"),
        ({**SCRIPT, "timeout_s": 0}, "timeout_s=0 is not a number of 0.001 or more"),
        ({**SCRIPT, "load_timeout_s": 0}, "load_timeout_s=0"),
        ({**SCRIPT, "port": 70000}, "port=70000"),
        ({**SCRIPT, "log_level": "loud"}, "log_level='loud' is not one of debug"),
        ({**SCRIPT, "tls_cert": "c.pem"}, "go together"),
        ({**SCRIPT, "host": "0.0.0.0"}, "so its clients need keys"),
        ({**SCRIPT, "host": "example.org"}, "so its clients need keys"),
        ({"name": "svc", "entry_script": "score.py"}, "without source_dir"),
        ({"name": "svc"}, "0 models and no entry_script"),
        ({"name": "svc", "models": [MODEL, {**MODEL, "version": "4"}]}, "2 models and no entry_script"),
        ({**SCRIPT, "models": [MODEL, MODEL]}, "named twice"),
        ({**SCRIPT, "models": [{**MODEL, "name": "../../etc"}]}, "'../../etc' is not a name"),
        ({**SCRIPT, "models": [{**MODEL, "version": "3/.."}]}, "'3/..' is not a version"),
        ({**SCRIPT, "models": [{"name": "digits"}]}, "a model lacks the key 'version'"),
        ({**SCRIPT, "models": {}}, "is not a list"),
    ],
)
def test_invalid_server_setting_is_named_in_the_error(value, said):
    with pytest.raises(ServingError) as error:
        ServerConfig.from_json(value)
    assert said in str(error.value)


@pytest.mark.promise("keys-asked-replaced-while-serves")
def test_binding_all_addresses_needs_api_keys():
    assert ServerConfig.from_json({**SCRIPT, "host": "0.0.0.0", "keys_file": "k"}).host == "0.0.0.0"


def test_missing_or_invalid_config_file_raises_serving_error(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ServingError, match="can't be read"):
        read_config(tmp_path / "config.json")
    with pytest.raises(ServingError, match="can't be read"):
        read_config(tmp_path / "none.json")
