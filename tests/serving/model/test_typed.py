"""A function with type hints, at a real server."""

from __future__ import annotations

import pytest

from tests.late import late
from tests.serving.servers import refusal, serving

openapi_spec_validator = late("openapi_spec_validator")
NESTED = '{"a": 1, "inner": ' * 900 + "null" + "}" * 900


@pytest.fixture(scope="module")
def typed(tmp_path_factory):
    script = """
    from __future__ import annotations
    from dataclasses import dataclass
    from typing import Literal
    import numpy as np

    @dataclass
    class Row:
        a: float
        b: int = 1
        inner: Row | None = None

        def __post_init__(self):
            if self.b == 13:
                raise LookupError("unlucky")

    def init():
        global factor
        factor = 2.0

    def predict(x: list[float], how: Literal["sum", "max"] = "sum", rows: list[Row] | None = None) -> float:
        if x and x[0] == 13:
            raise RuntimeError("unlucky")
        return factor * (sum(x) if how == "sum" else max(x)) + sum(row.a * row.b for row in rows or ())

    def predict_batch(calls):
        return [predict(**call) for call in calls]
    """
    with serving(tmp_path_factory.mktemp("typed"), script, max_batch=4) as server:
        yield server


def test_request_values_are_passed_by_parameter_name(typed):
    assert typed.score({"x": [1, 2]}).json() == 6.0
    assert typed.score({"x": [1, 2], "how": "max", "rows": [{"a": 1, "b": 3}]}).json() == 7.0
    assert typed.client.get("/score?x=[1,2]").json() == 6.0


@pytest.mark.promise("function-type-hints-given-fits")
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("", "the body is empty; it should be JSON."),
        ("{", "the body is not JSON"),
        ("[1]", "the body should be an object, not a list of 1."),
        ('{"x": [NaN]}', "the body is not JSON: NaN is not a number of JSON."),
        ('{"x": [1e999]}', "x[0] is too large for a number."),
        ("[" * 100000, "the body is nested too deeply."),
        (b"\xff\xfe{", "the body is no"),
        ("{}", "x is missing."),
        ('{"x": ["a"]}', "x[0] should be a number, not 'a'."),
        ('{"x": [], "y": 1}', "y: there is no such field. There are x, how, rows."),
        ('{"x": [], "how": "min"}', "how should be one of 'sum', 'max', not 'min'."),
        ('{"x": [], "rows": [{}]}', "rows[0].a is missing."),
        (f'{{"x": [1{"0" * 400}]}}', "x[0] is too large for a number."),
        (f'{{"x": [], "rows": [{NESTED}]}}', "the body is nested too deeply."),
        ('{"x": [], "rows": [{"a": 1, "b": 13}]}', "the request can't be read. Check the logs"),
    ],
    ids=range(15),
)
def test_invalid_input_returns_400_with_a_message_of_one_line(typed, body, said):
    answer = typed.score(body)
    assert answer.status_code == 400
    message = answer.json()["message"]
    assert message.startswith(said)
    assert "\n" not in message
    assert typed.score({"x": [1]}).json() == 2.0
    assert "ended" not in typed.log


def test_exception_of_one_request_fails_no_other_of_its_batch(typed):
    assert typed.score({"x": [13]}).status_code == 500


@pytest.mark.promise("function-type-hints-given-fits")
def test_openapi_describes_input_and_output(typed):
    document = typed.client.get("/openapi.json").json()
    openapi_spec_validator.validate(document)
    assert document["components"]["schemas"]["ServiceInput"]["required"] == ["x"]
    assert document["components"]["schemas"]["ServiceOutput"] == {"type": "number"}
    assert document["components"]["schemas"]["Row"]["properties"]["b"] == {"type": "integer"}


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("def predict(): pass", "predict() has no parameters"),
        ("def predict(x: complex): pass", "the type hint complex can't be checked"),
        ("def predict(x: 'Nowhere'): pass", "can't be read: name 'Nowhere' is not defined"),
        ("def predict(x, /): pass", "can't be given by a name"),
    ],
    ids=["nothing", "complex", "unknown", "positional"],
)
def test_unservable_signature_ends_the_server_at_start(tmp_path, script, said):
    assert said in refusal(tmp_path, script)
