"""A new sweep from an earlier one."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import SweepError
from paceline.runs import controllers, store, tags_and_properties
from paceline.runs.folder import RunFolder
from paceline.submit import SourceCopy
from paceline.sweeps import expressions
from paceline.sweeps.again import changed, read_space, space_text, submit_again
from paceline.sweeps.space import Space
from paceline.sweeps.spec import SweepSpec
from paceline.sweeps.start import submit_sweep
from tests.helpers import make_job, write_tree

SPACE = Space(
    {
        "--lr": expressions.loguniform(1e-4, 0.1),
        "batch": expressions.choice(32, 64),
        "kind": expressions.choice("a, b", 'say "c"', None, True, [1, 2]),
        "--depth": expressions.randint(1, 5),
        "noise": expressions.quniform(0, 1, 0.1),
        "--epochs": 10,
        "words": "choice(1)",
        "opt": expressions.choice({"--beta": expressions.uniform(0, 1)}, {}),
    }
)


def test_search_space_written_as_text_is_equal_after_reading() -> None:
    text = space_text(SPACE)
    assert text.splitlines()[:2] == ["--lr = loguniform(0.0001, 0.1)", "batch = choice(32, 64)"]
    assert read_space(text, SPACE) == SPACE
    # `read_space` parses the expressions itself if the old sweep does not have them.
    plain = Space({name: part for name, part in SPACE.parts().items() if name not in ("opt", "kind")})
    assert read_space(space_text(plain), Space({"x": 1})) == plain


def test_edited_text_of_a_search_space_changes_the_space() -> None:
    text = space_text(SPACE).replace("loguniform(0.0001, 0.1)", "uniform(0, 1)").replace("batch = choice(32, 64)", "")
    found = read_space(f"{text}\n\n  new=choice(1, 2) ", SPACE).parts()
    assert found["--lr"] == expressions.uniform(0, 1)
    assert "batch" not in found
    assert found["new"] == expressions.choice(1, 2)
    assert found["opt"] == SPACE.parts()["opt"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr", "'lr' is not a hyperparameter. Write one per line"),
        ("lr = ", "is not a hyperparameter"),
        ("lr = unifrom(0, 1)", "there is no unifrom()"),
        ("lr = 1\nlr = 2", "'lr' is there twice"),
        ('opt = choice({"a": 1}, {})', "a choice of spaces can't be changed here"),
        ("", "must be a mapping with a name"),
    ],
)
def test_invalid_space_text_is_refused(text: str, message: str) -> None:
    with pytest.raises(SweepError) as error:
        read_space(text, SPACE)
    assert message in str(error.value)


def test_parameters_of_a_search_space_can_be_replaced_added_and_removed() -> None:
    found = changed(SPACE, {"lr": 0.5, "new": 1}, without=["--batch", "opt"]).parts()
    assert found["--lr"] == expressions.fixed(0.5)
    assert {"batch", "opt"}.isdisjoint(found)
    assert list(found)[-1] == "new"
    with pytest.raises(SweepError, match=r"the space has no 'batsh'\. Did you mean"):
        changed(SPACE, {}, without=["batsh"])


@pytest.fixture
def before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A sweep that was submitted and whose controller never started."""
    monkeypatch.setattr(controllers, "start", lambda *given: None)
    code = write_tree(tmp_path / "code", {"train.py": "import sys; print(sys.argv)"})
    spec = SweepSpec(
        space=Space({"--lr": expressions.choice(0.1, 0.2), "--amp": expressions.choice(True, False)}),
        metric="loss",
        goal="minimize",
        trials=2,
        seed=3,
        switches=("--amp",),
        points=({"--lr": 0.1, "--amp": True},),
        counted_from=1,
        counted_utc="2026-01-01T00:00:00.000Z",
    )
    return submit_sweep(make_job(), spec, SourceCopy(directory=code), tmp_path / "ws", "tuned")


def test_sweep_submitted_again_with_a_new_space_keeps_the_source_metric_and_goal(before: RunFolder) -> None:
    space = Space({"--lr": expressions.uniform(0, 1)})
    folder = submit_again(before, before.path.parent.parent, space=space, trials=7)
    old, new = store.stored(before), store.stored(folder)
    spec = SweepSpec.from_json(new.sweep or {})
    assert (new.snapshot_id, new.experiment) == (old.snapshot_id, old.experiment)
    assert (spec.space, spec.trials, spec.metric, spec.goal) == (space, 7, "loss", "minimize")
    # Initial points and switches of the old sweep may not fit the new space, and the new sweep counts its own trials.
    # So these values are omitted.
    assert (spec.points, spec.switches, spec.counted_from, spec.counted_utc) == ((), (), 0, None)
    assert spec.seed != 3
    assert tags_and_properties.read(folder.notes).tags == {"sweep_of": before.run_id}


def test_sweep_submitted_again_without_changes_keeps_initial_points_and_boolean_switches(before: RunFolder) -> None:
    spec = SweepSpec.from_json(store.stored(submit_again(before, before.path.parent.parent)).sweep or {})
    assert (spec.points, spec.switches) == (({"--lr": 0.1, "--amp": True},), ("--amp",))


def test_invalid_changes_of_a_sweep_start_nothing(before: RunFolder) -> None:
    there = list(before.path.parent.iterdir())
    for values, message in (
        ({"trials": 0}, "trials=0 is not an integer"),
        ({"sampler": "tpo"}, "sampler='tpo'"),
        ({"learn": True}, "which learns nothing from results"),
    ):
        with pytest.raises(SweepError) as error:
            submit_again(before, before.path.parent.parent, **values)  # type: ignore[arg-type]
        assert message in str(error.value)
    assert list(before.path.parent.iterdir()) == there
