"""What a sweep is, as its record holds it."""

from __future__ import annotations

from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from tests.helpers import run_python


def test_sweep_with_an_optuna_sampler_can_be_read_if_optuna_is_not_installed() -> None:
    """`sweep show` and `sweep best` read a sweep on any machine."""
    spec = SweepSpec(space=Space({"x": 1}), metric="score", sampler="tpe")
    code = (
        "import sys; sys.modules['optuna'] = None\n"
        "from paceline.sweeps.spec import SweepSpec\n"
        f"print(SweepSpec.from_json({spec.to_json()!r}).sampler)"
    )
    assert run_python(code).strip() == "tpe"
