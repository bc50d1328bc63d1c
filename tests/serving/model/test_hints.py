"""Type hints compared with JSON values: accepted values, their types, and the error for a wrong value."""

from __future__ import annotations

import dataclasses
import datetime as dt
import enum
from typing import Annotated, Any, Literal, NamedTuple, Optional, TypedDict

import numpy as np
import numpy.typing as npt
import pytest

from paceline.errors import ServingError
from paceline.serving.model.answers import InputError
from paceline.serving.model.hints import Hints


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: float
    y: float = 0.0
    inner: Point | None = None

    def __post_init__(self):
        if self.x < 0:
            raise ValueError("x is below 0")


class Options(TypedDict, total=False):
    top: int


class Pair(NamedTuple):
    a: int
    b: str = "b"


def read(hint: Any, value: Any) -> Any:
    return Hints().of(hint).read(value, "x")


@pytest.mark.parametrize(
    ("hint", "value", "meant"),
    [
        (float, 1, 1.0),
        (int, 2.0, 2),
        (str, "ä", "ä"),
        (bool, True, True),
        (None, None, None),
        (Any, {"a": [1]}, {"a": [1]}),
        (list[float], [1, 2.5], [1.0, 2.5]),
        (list[list[int]], [[1], []], [[1], []]),
        (list, [1, "a"], [1, "a"]),
        (tuple[int, str], [1, "a"], (1, "a")),
        (tuple[int, ...], [1, 2, 3], (1, 2, 3)),
        (set[int], [1, 1], {1}),
        (dict[str, int], {"a": 1}, {"a": 1}),
        (int | None, None, None),
        (float | int, 3, 3),
        (Optional[int], 3, 3),  # noqa: UP045 - as older scripts write it
        (int | str, "a", "a"),
        (Literal["a", 1], 1, 1),
        (Colour, "red", Colour.RED),
        (Point, {"x": 1, "inner": {"x": 2}}, Point(1.0, 0.0, Point(2.0))),
        (Options, {"top": 3}, {"top": 3}),
        (Options, {}, {}),
        (Pair, {"a": 1}, Pair(1)),
        (bytes, "aGk=", b"hi"),
        (dt.datetime, "2026-01-31T12:00:00Z", dt.datetime(2026, 1, 31, 12, tzinfo=dt.timezone.utc)),
        (dt.date, "2026-01-31", dt.date(2026, 1, 31)),
        (Annotated[int, "anything"], 1, 1),
    ],
)
def test_valid_json_value_is_converted_to_the_type_of_its_type_hint(hint, value, meant):
    found = read(hint, value)
    assert (found, type(found)) == (meant, type(meant))


@pytest.mark.promise("function-type-hints-given-fits")
@pytest.mark.parametrize(
    ("hint", "value", "said"),
    [
        (float, "1", "x should be a number, not '1'."),
        (float, True, "x should be a number, not true."),
        (float, None, "x should be a number, not null."),
        (float, float("inf"), "x is too large for a number."),
        (float, 10**400, "x is too large for a number."),
        (int, 1.5, "x should be a whole number, not 1.5."),
        (int, float("inf"), "x should be a whole number, not inf."),
        (str, 1, "x should be a text, not 1."),
        (bool, 1, "x should be true or false, not 1."),
        (list[float], [1, "a"], "x[1] should be a number, not 'a'."),
        (list[float], [1, True], "x[1] should be a number, not true."),
        (list[float], [1, 10**400], "x[1] is too large for a number."),
        (list[float], 1, "x should be a list, not 1."),
        (list[list[int]], [[1], [None]], "x[1][0] should be a whole number, not null."),
        (tuple[int, str], [1], "x should be a list of 2, not a list of 1."),
        (set[list[int]], [[1]], "x has an item that a set can't hold."),
        (dict[str, int], {"a": "b"}, "x['a'] should be a whole number, not 'b'."),
        (int | None, "a", "x should be a whole number or null, not 'a'."),
        (list[int] | None, ["a"], "x[0] should be a whole number, not 'a'."),
        (Literal["a", 1], True, "x should be one of 'a', 1, not true."),
        (Colour, "blue", "x should be one of 'red', not 'blue'."),
        (Point, [], "x should be an object, not a list of 0."),
        (Point, {}, "x.x is missing."),
        (Point, {"x": 1, "z": 2}, "x.z: there is no such field. There are x, y, inner."),
        (Point, {"x": 1, "inner": {"x": "a"}}, "x.inner.x should be a number, not 'a'."),
        (Point, {"x": -1}, "x: x is below 0"),
        (Options, {"top": "a"}, "x.top should be a whole number, not 'a'."),
        (bytes, "%", "x should be a text in base64, not '%'."),
        (dt.date, "yesterday", "x should be a date as 2026-01-31, not 'yesterday'."),
        (str, ["a" * 100] * 3, "x should be a text, not a list of 3."),
        (int, "a" * 100, f"x should be a whole number, not '{'a' * 56}...."),
    ],
)
def test_value_that_does_not_fit_its_type_hint_is_refused_with_its_path(hint, value, said):
    with pytest.raises(InputError) as error:
        read(hint, value)
    assert str(error.value) == said


def test_array_parameter_of_a_scoring_function_gets_the_hinted_dtype_and_shape():
    found = read(Annotated[npt.NDArray[np.float32], (None, 2)], [[1, 2.5], [3, 4]])
    assert (found.dtype, found.shape, found.tolist()) == (np.float32, (2, 2), [[1.0, 2.5], [3.0, 4.0]])
    assert read(np.ndarray, [1, 2]).tolist() == [1, 2]
    assert Hints().of(Annotated[npt.NDArray[np.float32], (None, 2)]).schema == {
        "type": "array",
        "items": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
    }


@pytest.mark.parametrize(
    ("hint", "value", "said"),
    [
        (np.ndarray, 1, "x should be a list of numbers, not 1."),
        (np.ndarray, [[1], [1, 2]], "x: its lists differ in length."),
        (np.ndarray, ["1"], "x should hold numbers alone."),
        (np.ndarray, [None], "x should hold numbers alone."),
        (np.ndarray, [10**30], "x should hold numbers alone."),
        (np.ndarray, [float("inf")], "x has a number that is too large."),
        (npt.NDArray[np.int64], [1.5], "x should hold values of int64 alone."),
        (npt.NDArray[np.uint8], [256], "x should hold values of uint8 alone."),
        (npt.NDArray[np.float32], [1e300], "x should hold values of float32 alone."),
        (Annotated[np.ndarray, (2,)], [1], "x should be numbers of shape 2, not 1."),
        (Annotated[np.ndarray, (None, 2)], [1], "x should be numbers of shape any x 2, not 1."),
    ],
)
def test_array_value_that_does_not_fit_its_type_hint_is_refused_with_the_reason(hint, value, said):
    with pytest.raises(InputError) as error:
        read(hint, value)
    assert str(error.value) == said


@pytest.mark.parametrize("value", [[1e300], [2**64 - 1]])
def test_number_that_a_torch_tensor_does_not_hold_is_refused(value):
    torch = pytest.importorskip("torch")
    with pytest.raises(InputError, match="x should hold values of"):
        read(torch.Tensor, value)


def test_type_hint_without_a_json_form_is_refused_by_name():
    for hint, name in ((complex, "complex"), (type, "type"), (dict[int, int], "dict")):
        with pytest.raises(ServingError, match=name):
            Hints().of(hint)


def test_json_schema_of_a_named_type_is_referenced_by_its_name_and_may_be_recursive():
    hints = Hints()
    assert hints.of(list[Point]).schema == {"type": "array", "items": {"$ref": "#/components/schemas/Point"}}
    assert hints.schemas["Point"] == {
        "type": "object",
        "properties": {
            "x": {"type": "number"},
            "y": {"type": "number"},
            "inner": {"anyOf": [{"$ref": "#/components/schemas/Point"}, {"type": "null"}]},
        },
        "required": ["x"],
        "additionalProperties": False,
    }
