"""A layered environment with one small package: the first time against uv by hand, and the second time.

By hand is `uv venv`, then `uv pip install einops`, with uv's variables set to what pip is configured to. Both sides take the
package from uv's cache, which a first round has filled. uv by hand does not see the interpreter's own packages; einops needs
none.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from common import in_turn, median, report, scratch
from paceline import Environment
from paceline.environments import pip_settings
from paceline.environments.store import EnvironmentStore
from paceline.environments.venv import build_environment, find_uv

ROUNDS = 9
PACKAGE = "einops"
FIRST_S = 1.0
SECOND_S = 0.15


def by_hand(prefix: Path, uv: str, environment: dict[str, str]) -> float:
    """Seconds for `uv venv` and `uv pip install`."""
    before = time.perf_counter()
    for words in (
        ["venv", "--quiet", "--python", sys.executable, str(prefix)],
        ["pip", "install", "--quiet", "--python", str(prefix / "bin" / "python"), PACKAGE],
    ):
        subprocess.run([uv, *words], check=True, env=environment, cwd=prefix.parent, capture_output=True)
    return time.perf_counter() - before


def main() -> None:
    uv = find_uv()
    assert uv is not None
    wanted = Environment(pip_packages=[PACKAGE], layered=True)
    with scratch() as folder:
        environment = build_environment() | pip_settings.read(dict(os.environ)).uv_variables()
        counter = iter(range(10**6))
        second: list[float] = []

        def theirs() -> float:
            return by_hand(folder / f"by-hand-{next(counter)}", uv, environment)

        def ours() -> float:
            store = EnvironmentStore(folder / f"environments-{next(counter)}")
            before = time.perf_counter()
            built = store.ensure(wanted, sys.executable, lambda line: None)
            between = time.perf_counter()
            assert store.ensure(wanted, sys.executable, print).key == built.key
            second.append(time.perf_counter() - between)
            return between - before

        first, hand = in_turn(ROUNDS, ours, theirs)
        more = median(first) - median(hand)
        report(
            "layered_environment_first",
            f"layered environment with {PACKAGE}, first time, minus uv by hand",
            "at most 1 s more than uv",
            more <= FIRST_S,
            ours_s=median(first),
            uv_s=median(hand),
            more_s=more,
            rounds=ROUNDS,
        )
        report(
            "layered_environment_second",
            f"layered environment with {PACKAGE}, second time",
            "at most 0.15 s",
            max(second) <= SECOND_S,
            median_s=median(second),
            longest_s=max(second),
            rounds=len(second),
        )


if __name__ == "__main__":
    main()
