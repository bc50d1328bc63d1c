"""What the report of a run says of an error on a node."""

from __future__ import annotations

import pytest

from paceline.data.stores.failures import StoreUnreachableError
from paceline.errors import DataError, EngineError, EnvironmentBuildError, LauncherError
from paceline.node.__main__ import _failure


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (EnvironmentBuildError("x"), "environment"),
        (LauncherError("x"), "launcher"),
        (EngineError("podman gave no answer"), "launcher"),
        (DataError("x"), "data"),
        (StoreUnreachableError("x"), "data"),
    ],
    ids=["build", "launcher", "engine", "data", "store"],
)
def test_exception_type_raised_in_a_node_program_determines_the_reported_failure_cause(
    error: Exception, cause: str
) -> None:
    assert _failure(error) == {"cause": cause, "message": str(error)}
