from __future__ import annotations

import pytest

from paceline import errors
from paceline.compat.azureml import exceptions as sdk


@pytest.mark.promise("paceline-s-errors-arrive-sdk")
@pytest.mark.parametrize(
    ("own", "theirs"),
    [
        (errors.JobError, sdk.UserErrorException),
        (errors.TargetError, sdk.ComputeTargetException),
        (errors.SnapshotError, sdk.SnapshotException),
        (errors.WorkspaceError, sdk.WorkspaceException),
        (errors.EngineError, sdk.ServiceException),
        (errors.RunNotFoundError, sdk.ExperimentNotFoundException),
        (errors.TransferError, sdk.AzureMLException),
    ],
)
def test_paceline_errors_are_raised_as_sdk_exceptions(own, theirs):
    @sdk.sdk_errors
    def call():
        raise own("what is wrong")

    with pytest.raises(theirs, match="what is wrong") as caught:
        call()
    assert caught.value.message == "what is wrong"
    assert type(caught.value).__name__ == theirs.__name__
    # An `except` clause for Paceline's own exception type also catches the SDK's exception.
    assert isinstance(caught.value, own)


def test_exception_of_a_web_service_keeps_its_cause_and_status():
    cause = OSError("no route")
    error = sdk.WebserviceException("it failed", status_code=502, inner_exception=cause)
    assert (error.message, error.status_code, error.inner_exception) == ("it failed", 502, cause)


@pytest.mark.promise("paceline-s-errors-arrive-sdk")
def test_errors_of_static_class_and_instance_methods_become_sdk_exceptions():
    @sdk.sdk_class
    class Thing:
        @staticmethod
        def one():
            raise errors.JobError("a")

        @classmethod
        def two(cls):
            raise errors.JobError("b")

        @property
        def three(self):
            raise errors.JobError("c")

        def four(self):
            yield 1
            raise errors.JobError("d")

    class Native:
        def five(self):
            raise errors.JobError("e")

    @sdk.sdk_class
    class PathAttribute(Thing, Native):
        pass

    below = PathAttribute()
    for call in (Thing.one, Thing.two, lambda: Thing().three, lambda: [*below.four()], below.five, PathAttribute.one):
        with pytest.raises(sdk.UserErrorException):
            call()
