"""Attributes of the SDK's objects, for variables whose class follows from the program's text."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import textwrap
from typing import Any

from paceline.compat.azureml.aliases import FINDER
from paceline.compat.azureml.records import late

_RUNS = (("core.run", "Run"), ("train.hyperdrive.run", "HyperDriveRun"), ("pipeline.core.run", "PipelineRun"))
#: Method without a useful return annotation -> the classes that its result may have.
_GIVEN = {
    "get_context": _RUNS[:1],
    "start_logging": _RUNS[:1],
    "submit": _RUNS,
    "get_default_datastore": (("core.datastore", "Datastore"),),
    "register_model": (("core.model", "Model"),),
    "deploy": (("core.webservice", "AksWebservice"), ("core.webservice", "LocalWebservice")),
}


def given_by_call(kind: type) -> tuple[type, ...]:
    """Return the class of `kind(...)` as (class,), or () if unknown."""
    own = any("__new__" in vars(above) and above.__module__.startswith("paceline.") for above in kind.__mro__)
    return () if own else (kind,)


def given_by(owner: type, method: str) -> tuple[type, ...]:
    """Return the known classes of objects that a method may return."""
    function = getattr(owner, method, None)
    if not callable(function) or refusal(function) is not None:
        return ()
    if method in _GIVEN:
        return tuple(late(module, name) for module, name in _GIVEN[method])
    named = getattr(function, "__annotations__", {}).get("return")
    module = importlib.import_module(function.__module__)
    found: Any = getattr(module, named, None) if isinstance(named, str) else named
    return (found,) if isinstance(found, type) and found.__module__.startswith("paceline.compat.azureml.") else ()


#: Methods that only runs of AutoML have in the SDK.
_OF_AUTOML = (
    *("continue_experiment", "get_best_child", "get_guardrails", "get_output", "get_run_sdk_dependencies", "pause"),
    *("cancel_iteration", "register_model_with_guardrails", "resume", "retry", "summary"),
)


def missing(classes: tuple[type, ...], name: str) -> str | None:
    """Return why no class of `classes` has the attribute `name`; None if one has it."""
    whys = [_missing(one, name) for one in classes]
    # Prefer the message of a method that always raises an exception, because this message names an alternative.
    return min(whys, key=lambda why: " has no " in str(why)) if all(whys) else None


def _missing(kind: type, name: str) -> str | None:
    if hasattr(kind, "__getattr__") or name in _set_by(kind):
        return None
    if not hasattr(kind, name):
        if name in _OF_AUTOML and issubclass(kind, late("core.run", "Run")):
            return f"{name} is a method of AutoML's runs. {FINDER.absent('train.automl')}"
        return f"{sdk_name(kind)} has no {name} here."
    return refusal(getattr(kind, name))


@functools.cache
def refusal(found: object) -> str | None:
    """Return the message of a class or function that always raises, otherwise None.

    For a function whose name begins with `_`, return None without examining the function.
    """
    if not callable(found):
        return None
    function = inspect.unwrap(getattr(found, "__func__", found))
    if (message := getattr(found, "refused", None)) or not inspect.isfunction(function):
        return message
    try:
        (written,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError, ValueError):
        return None
    body = written.body if isinstance(written, ast.FunctionDef) and not written.name.startswith("_") else []
    kept = [one for one in body if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
    if len(kept) != 1 or not isinstance(kept[0], ast.Raise) or kept[0].exc is None:
        return None
    try:
        # Evaluate the expression after `raise` in the function. This creates the exception without raising it.
        return str(eval(compile(ast.Expression(kept[0].exc), "<refusal>", "eval"), function.__globals__))
    except NameError:
        return (function.__doc__ or "").strip().partition("\n")[0]  # the exception's text needs the call's arguments


@functools.cache
def _set_by(kind: type) -> frozenset[str]:
    """Return the attributes that a class and its bases assign to their instances."""
    found: set[str] = set()
    for above in kind.__mro__:
        found |= set(getattr(above, "__annotations__", {}))
        try:
            found |= set(re.findall(r"\b(?:self|made)\.(\w+)", inspect.getsource(above)))
        except (OSError, TypeError):
            continue  # a built-in class, such as object, has no source to search
    return frozenset(found)


def sdk_name(kind: type) -> str:
    return f"azureml{kind.__module__.removeprefix('paceline.compat.azureml')}.{kind.__name__}"


def is_target(kind: type) -> bool:
    """Return whether calling the class looks up a compute target by name."""
    return issubclass(kind, late("core.compute", "ComputeTarget"))


def unknown_target(name: object) -> str:
    """Return advice for a program that does not handle a missing compute target."""
    shown = str(name) if isinstance(name, str) else "NAME"
    return (
        "it raises ComputeTargetException unless a target of this name was created or added: "
        f"paceline compute add {shown} --kind ssh ..., or write compute_target={shown!r}, which means this machine."
    )
