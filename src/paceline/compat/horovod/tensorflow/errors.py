"""Errors of collectives under TensorFlow's classes too, in eager execution and out of a graph.

    the ranks disagree, or one has joined      tf.errors.FailedPreconditionError
    a rank is gone                             tf.errors.UnknownError
    what is wrong on this rank alone           tf.errors.InvalidArgumentError, and ValueError

The first two are `HorovodInternalError` as well. A graph calls Python through an operation of TensorFlow's that knows the class
of few errors: ValueError comes out of it as InvalidArgumentError, most others as UnknownError, whose message begins with the
name of the class that was raised. The two places where TensorFlow runs graphs are made to raise these classes instead.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import tensorflow as tf
from tensorflow.python.client import session
from tensorflow.python.eager import context

from paceline.collectives.errors import ArgumentError, ShutDownError
from paceline.compat.horovod.common.exceptions import HorovodInternalError

T = TypeVar("T")


class _Error:
    """The common part of the errors: they are made as TensorFlow's own are, which Keras makes anew with more in the message.

    node_def, op: the operation of the graph that failed; None in eager execution.
    """

    _of: ClassVar[type[Any]]

    def __init__(self, node_def: Any = None, op: Any = None, message: str = "", *details: Any) -> None:
        self._of.__init__(self, node_def, op, message, *details)

    def __str__(self) -> str:
        return str(self._of.__str__(self))  # type: ignore[call-arg]


class HorovodPreconditionError(_Error, HorovodInternalError, tf.errors.FailedPreconditionError):  # type: ignore[misc]
    """The ranks disagree on an operation, or it can't be done while one of them has joined; raised on all that asked for it."""

    _of = tf.errors.FailedPreconditionError


class HorovodUnknownError(_Error, HorovodInternalError, tf.errors.UnknownError):  # type: ignore[misc]
    """A rank is gone, or communication has failed."""

    _of = tf.errors.UnknownError


class HorovodInvalidArgumentError(_Error, ValueError, tf.errors.InvalidArgumentError):  # type: ignore[misc]
    """An operation can't be right on this rank."""

    _of = tf.errors.InvalidArgumentError


#: As the message of an UnknownError names the class that was raised in Python.
_RAISED = re.compile(rf"\b({HorovodPreconditionError.__name__}|{HorovodUnknownError.__name__}): ")
_CLASSES: dict[str, type[Any]] = {cls.__name__: cls for cls in (HorovodPreconditionError, HorovodUnknownError)}


@contextmanager
def translated() -> Iterator[None]:
    """Raise the errors of collectives in the block under TensorFlow's classes too."""
    try:
        yield
    # Another block within this one has given it its class already.
    except tf.errors.OpError:
        raise
    except HorovodInternalError as error:
        is_gone = isinstance(error.__cause__, ShutDownError)
        cls = HorovodUnknownError if is_gone else HorovodPreconditionError
        raise cls(None, None, str(error)) from error
    except (ArgumentError, ValueError) as error:
        raise HorovodInvalidArgumentError(None, None, str(error)) from error


def aware(call: Callable[..., T]) -> Callable[..., T]:
    """A method of TensorFlow's that runs a graph, which raises these classes where they were raised within it."""

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> T:
        try:
            return call(*args, **kwargs)
        except tf.errors.UnknownError as error:
            own = _own(error)
            if own is error:
                raise
            raise own.with_traceback(error.__traceback__) from None

    return called


def install() -> None:
    """Let TensorFlow's functions and sessions raise these classes; again: nothing happens."""
    for owner, name in ((context.Context, "call_function"), (session.BaseSession, "_do_call")):
        # A later TensorFlow may lack one of the two; then errors out of graphs stay UnknownErrors.
        call = getattr(owner, name, None)
        # `functools.wraps` leaves `__wrapped__`, which tells that it was done before.
        if call is not None and not hasattr(call, "__wrapped__"):
            setattr(owner, name, aware(call))


def _own(error: Any) -> Exception:
    found = None if isinstance(error, HorovodInternalError) else _RAISED.search(error.message)
    if found is None:
        return error  # type: ignore[no-any-return]
    return _CLASSES[found[1]](error.node_def, error.op, error.message)  # type: ignore[no-any-return]


install()
