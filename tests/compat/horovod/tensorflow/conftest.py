"""Worlds of ranks with TensorFlow that run all checks once; each test then reads what came of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from tests.compat.horovod.conftest import run_on_ranks
from tests.compat.horovod.tensorflow.world import CHECKS
from tests.ranks import Worlds, checks_in
from tests.warm import OLDER_KERAS, TENSORFLOW

_ANY = ("collectives", "semantics", "gradients", "graphs", "reduction", "state")
#: Number of ranks -> modules of checks to run on that many ranks. Two ranks also compare a training with one process.
#: Three ranks run the checks that depend on the number of ranks. Four ranks are left out, because a process takes six
#: CPU seconds to load TensorFlow. The checks with torch (tests/compat/horovod/conftest.py) cover them.
MODULES = {
    1: _ANY,
    2: (*_ANY, "training"),
    3: ("collectives", "semantics", "gradients"),
}
#: Modules of checks that run with tf_keras instead of Keras 3.
LEGACY_MODULES = ("legacy",)
_WORLD = Path(__file__).with_name("world.py")


def every_check(modules: tuple[str, ...]) -> list[str]:
    return [f"{module}.{check}" for module in modules for check in checks_in(CHECKS, module)]


@pytest.fixture(scope="session")
def outcome(request: pytest.FixtureRequest, worlds: Worlds) -> Callable[..., None]:
    """A function that fails as the check did on any of so many ranks."""

    ours = [item for item in request.session.items if item.path.parent == _WORLD.parent]
    params = [
        cast(pytest.Function, item).callspec.params for item in ours if "outcome" in getattr(item, "fixturenames", ())
    ]

    def look(ranks: int, check: str, *, legacy: bool = False) -> None:
        def start(folder: Path) -> str:
            variables = {"TF_CPP_MIN_LOG_LEVEL": "3", "TF_USE_LEGACY_KERAS": "1" if legacy else "0"}
            loaded = OLDER_KERAS if legacy else TENSORFLOW
            # Run only the checks that pytest has collected.
            names = [one["check"] for one in params if one.get("ranks") == (None if legacy else ranks)]
            return run_on_ranks(ranks, _WORLD, str(folder), *names, loaded=loaded, **variables).stderr

        worlds.look(f"tensorflow{'-legacy' * legacy}-on-{ranks}", ranks, check, start)

    return look
