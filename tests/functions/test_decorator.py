from __future__ import annotations

import asyncio
import re

import pytest

import paceline
from paceline.errors import JobError
from paceline.functions import FunctionJob
from tests.helpers import run_python


@paceline.job
def double(x: int) -> int:
    """Double a number."""
    return 2 * x


@paceline.job(nodes=2)
def ranked(x: int) -> int:
    return x


def test_decorated_function_called_directly_returns_its_value():
    assert double(4) == 8
    assert (double.__name__, double.__doc__) == ("double", "Double a number.")
    assert isinstance(ranked, FunctionJob)


def test_options_method_returns_a_changed_copy_and_leaves_the_decorated_function_unchanged():
    other = ranked.options(nodes=3)
    assert (other._options, ranked._options) == ({"nodes": 3}, {"nodes": 2})
    assert other.function is ranked.function


@pytest.mark.parametrize(
    "statement", ["import paceline", "import paceline, paceline.job.job", "from paceline import Job; import paceline"]
)
def test_paceline_job_remains_the_decorator_after_the_subpackage_paceline_job_is_imported(statement):
    code = f"{statement}\ntry:\n    paceline.job(lambda: 1)\nexcept ValueError as error:\n    print(error)"
    assert "on a lambda" in run_python(code)


def closing(x):
    @paceline.job
    def inner():
        return x

    return inner


class Trainer:
    def fit(self):
        return 1


def values():
    yield 1


async def fetch():
    await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: paceline.job(lambda x: x), "on a lambda, which has no name"),
        (
            lambda: closing(1),
            "inside a function: a worker can't import it. Move it to the module. It uses x of the outer function",
        ),
        (lambda: paceline.job(Trainer.fit), "on the method Trainer.fit"),
        (lambda: paceline.job(values), "which is a generator: it has no result to send. Return a list"),
        (lambda: paceline.job(fetch), "which is a coroutine: it has no result to send. Call asyncio.run()"),
        (lambda: paceline.job(len), "which is not a function"),
    ],
)
def test_decorator_refuses_a_function_that_workers_cannot_import(make, message):
    with pytest.raises(JobError, match=re.escape(message)):
        make()


@pytest.mark.promise("function-worker-cannot-import-refused")
def test_decorator_refuses_a_function_defined_at_an_interactive_python_prompt():
    code = "import paceline\ntry:\n    @paceline.job\n    def f(): ...\nexcept ValueError as error:\n    print(error)"
    assert "f of a notebook or prompt" in run_python(code)
