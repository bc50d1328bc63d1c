"""Worlds of ranks with one Keras each that run all checks once; each test then reads what came of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from tests.compat.horovod.conftest import run_on_ranks
from tests.compat.horovod.keras.world import CHECKS
from tests.engines.conftest import require_engine
from tests.ranks import Worlds, checks_in
from tests.warm import KERAS_ON_TORCH, OLDER_KERAS, TENSORFLOW

_WORLD = Path(__file__).with_name("world.py")
#: Modules of checks for every Keras.
_COMMON = ("training", "values", "callbacks", "saving", "elastic")
#: Kind of Keras -> required packages, modules to preload, environment variables, the script's import, modules of checks.
KINDS = {
    "keras-tensorflow": (
        ("keras", "tensorflow", "tf_keras"),
        TENSORFLOW,
        {"KERAS_BACKEND": "tensorflow"},
        "horovod.keras",
        (*_COMMON, "keras3", "graphs", "keras2"),
    ),
    "keras-torch": (
        ("keras", "torch"),
        KERAS_ON_TORCH,
        {"KERAS_BACKEND": "torch"},
        "horovod.keras",
        (*_COMMON, "keras3"),
    ),
    "tf_keras": (
        ("tf_keras", "tensorflow"),
        OLDER_KERAS,
        {"TF_USE_LEGACY_KERAS": "1"},
        "horovod.tensorflow.keras",
        (*_COMMON, "keras2", "graphs"),
    ),
}
#: Checks for scripts that import Horovod's package for tf_keras. The other checks of `keras2` also run with Keras 3,
#: because Horovod's package for Keras 3 accepts optimizers of tf_keras too.
_OF_ITS_OWN_PACKAGE = {
    "keras2.check_tf_keras_is_the_keras_of_tensorflow",
    "keras2.check_model_files_with_legacy_optimizers_are_loaded",
}


def checks(kind: str) -> list[str]:
    """The names of all checks for this Keras."""
    left_out = _OF_ITS_OWN_PACKAGE if kind == "keras-tensorflow" else ()
    names = [f"{module}.{check}" for module in KINDS[kind][4] for check in checks_in(CHECKS, module)]
    return [name for name in names if name not in left_out]


@pytest.fixture(scope="session")
def outcome(request: pytest.FixtureRequest, worlds: Worlds) -> Callable[[str, int, str], None]:
    """A function that fails as the check did on any of so many ranks."""

    params = [
        cast(pytest.Function, item).callspec.params
        for item in request.session.items
        if "outcome" in getattr(item, "fixturenames", ())
    ]
    asked = [(one["kind"], one["ranks"], one["check"]) for one in params if "kind" in one]

    def look(kind: str, ranks: int, check: str) -> None:
        needs, loaded, variables, module, _ = KINDS[kind]
        for need in needs:
            require_engine(need, importlib.util.find_spec(need))
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_USE_LEGACY_KERAS": "0"}

        names = [one for *place, one in asked if place == [kind, ranks]]

        def start(folder: Path) -> str:
            arguments = (str(folder), module, *names)
            return run_on_ranks(ranks, _WORLD, *arguments, loaded=loaded, **(quiet | variables)).stderr

        worlds.look(f"{kind}-on-{ranks}", ranks, check, start)

    return look
